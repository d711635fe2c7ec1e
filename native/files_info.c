// What is there: stat, list; and the two that only set: mkdir, chmod.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "files.h"

#define DATABASE_MAX (1u << 20)        // of /etc/passwd and /etc/group, which the agent may have written

// The name of a number in a colon-separated database of the sandbox; the number itself when there is no decent one.
static void look_up(const char *path, uint32_t id, char out[64]) {
  snprintf(out, 64, "%u", id);
  int fd = open_beneath(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
  struct stat st;
  char *text = NULL;
  if (fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size > 0 && (text = malloc(DATABASE_MAX + 1))) {
    size_t n = 0;
    for (ssize_t r; n < DATABASE_MAX && (r = read(fd, text + n, DATABASE_MAX - n)) > 0;) n += (size_t)r;
    text[n] = 0;
    for (char *line = text, *next; line && *line; line = next) {
      next = strchr(line, '\n');
      if (next) *next++ = 0;
      char *a = strchr(line, ':'), *b = a ? strchr(a + 1, ':') : NULL, *end;
      if (!b || a == line || a - line > 32 || b[1] < '0' || b[1] > '9') continue;
      unsigned long v = strtoul(b + 1, &end, 10);
      if (*end != ':' || v != id) continue;
      size_t ok = 0;
      while (line + ok < a && line[ok] > ' ' && line[ok] < 127) ok++;
      if (line + ok != a) continue;    // not printable ASCII: not a name to show
      memcpy(out, line, ok);
      out[ok] = 0;
      break;
    }
  }
  free(text);
  if (fd >= 0) close(fd);
}

void owners_fill(struct owners *o, uint32_t uid, uint32_t gid) {
  if (!(o->valid & 1) || o->uid != uid) look_up("/etc/passwd", uid, o->owner);
  if (!(o->valid & 2) || o->gid != gid) look_up("/etc/group", gid, o->group);
  o->uid = uid;
  o->gid = gid;
  o->valid = 3;
}

// Names are looked up once per owner in a listing, whatever the order of the entries.
#define OWNERS 16
struct cache { struct owners o[OWNERS]; };

static struct owners *owners_of(struct cache *c, const struct stat *st) {
  struct owners *o = &c->o[(st->st_uid * 31 + st->st_gid) % OWNERS];
  owners_fill(o, st->st_uid, st->st_gid);
  return o;
}

static void info_fields(struct buf *b, const struct owners *o, int dir, const char *name, const char *path, const char *rest, const struct stat *st) {
  char target[PATH_MAX];
  frame_text(b, T_NAME, name);
  size_t n = strlen(path), m = rest ? strlen(rest) : 0;
  while (n && path[n - 1] == '/') n--;                           // "/" itself becomes "" and then "/" + rest
  char *full = malloc(n + m + 2);
  if (!full) { b->overflow = 1; return; }
  memcpy(full, path, n);
  full[n] = '/';
  if (m) memcpy(full + n + 1, rest, m);
  full[m ? n + 1 + m : n ? n : 1] = 0;
  frame_text(b, T_PATH, full);
  free(full);
  frame_text(b, T_TYPE, type_name(st->st_mode));
  frame_u64(b, T_SIZE, (uint64_t)st->st_size);
  frame_u64(b, T_MODE, st->st_mode & 07777);
  frame_u64(b, T_UID, st->st_uid);
  frame_u64(b, T_GID, st->st_gid);
  frame_text(b, T_OWNER, o->owner);
  frame_text(b, T_GROUP, o->group);
  frame_u64(b, T_MTIME_NS, (uint64_t)((int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec));
  if (!S_ISLNK(st->st_mode)) return;
  ssize_t got = readlinkat(dir, name, target, sizeof target - 1);
  if (got < 0) return;                 // replaced meanwhile: what stat saw stands
  target[got] = 0;
  frame_text(b, T_TARGET, target);
}

static const char *last_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash && slash[1] ? slash + 1 : path;
}

int op_stat(struct job *j) {
  struct owners o = {0};
  struct stat st;
  struct place p = {.dir = -1};
  const char *path = j->a.path;
  int fd = open_beneath(AT_FDCWD, path, O_PATH | (j->a.follow ? 0 : O_NOFOLLOW), 0);
  if (fd < 0) return fail_errno(j, "stat", path, NULL);
  if (fstat(fd, &st)) { fail_errno(j, "stat", path, NULL); close(fd); return -1; }
  owners_fill(&o, st.st_uid, st.st_gid);
  if (S_ISLNK(st.st_mode) && place_find(j, path, 0, 0, &p)) { close(fd); return -1; }
  struct buf *b = &j->out;
  frame_begin(b, F_STATUS, 0, j->request);
  info_fields(b, &o, p.dir, S_ISLNK(st.st_mode) ? p.name : last_name(path), path, NULL, &st);
  close(fd);
  if (p.dir >= 0) close(p.dir);
  if (frame_send(j->conn, b)) { j->gone = 1; return fail(j, "internal", errno, "stat: the connection is gone"); }
  return 0;
}

int op_list(struct job *j) {
  struct args *a = &j->a;
  struct cache *cache = calloc(1, sizeof *cache);
  struct walk w = {0};
  struct visit v;
  struct stat st;
  uint64_t depth = a->has & HAS(T_DEPTH) ? a->depth : 1, most = a->has & HAS_LENGTH ? a->length : LIST_ENTRIES;
  if (!cache) return fail(j, "no_memory", ENOMEM, "list %.500s: no memory", a->path);
  if (!depth || depth > LIST_DEPTH_MAX || !most || most > LIST_ENTRIES_MAX) {
    free(cache);
    return fail(j, "invalid_request", 0, "list: depth must be 1..%d and the number of entries 1..%d", LIST_DEPTH_MAX, LIST_ENTRIES_MAX);
  }
  int fd = open_beneath(AT_FDCWD, a->path, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0), r = -1;
  if (fd < 0) { free(cache); return fail_errno(j, "list", a->path, NULL); }
  if (walk_start(&w, fd)) { fail_errno(j, "list", a->path, NULL); goto out; }
  size_t packed = 0;                   // bytes of whole frames at the start of j->out
  while ((r = walk_next(&w, &v)) != WALK_END) {
    if (r < 0) { fail_errno(j, "list", a->path, w.path); goto out; }
    if (r == WALK_LEAVE) continue;
    r = -1;
    if (fstatat(v.dir, v.name, &st, AT_SYMLINK_NOFOLLOW)) {
      if (errno == ENOENT) continue;   // gone since it was read
      fail_errno(j, "list", a->path, w.path);
      goto out;
    }
    if (j->done++ == most) {
      fail(j, "file_error", EOVERFLOW, "list %.500s: more than %llu entries; list a part of it", a->path, (unsigned long long)most);
      goto out;
    }
    struct buf b = {.data = j->out.data + packed, .cap = j->out.cap - packed};
    frame_begin(&b, F_RECORD, 0, j->request);
    info_fields(&b, owners_of(cache, &st), v.dir, v.name, a->path, w.path, &st);
    size_t n = frame_end(&b);
    if (!n) { fail(j, "file_error", ENAMETOOLONG, "list %.500s: the path of %.200s is too long to send", a->path, v.name); goto out; }
    packed += n;
    if (packed > j->out.cap / 2) {
      if (send_all(j, j->out.data, packed, 0)) goto out;
      packed = 0;
    }
    if (!S_ISDIR(st.st_mode) || (uint64_t)w.depth >= depth || walk_pseudo(&w, &v, &st)) continue;
    if (walk_enter(&w, NULL)) {
      if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) continue;   // replaced since
      fail_errno(j, "list", a->path, w.path);
      goto out;
    }
  }
  r = packed ? send_all(j, j->out.data, packed, 0) : 0;
  j->reports = REPORT_DONE;
out:
  walk_stop(&w);
  free(cache);
  return r;
}

int op_mkdir(struct job *j) {
  struct args *a = &j->a;
  struct place p;
  struct stat st;
  int made = 1, fd;
  if (a->parents) {
    if ((fd = make_dir(j, a->path, 1, &made)) < 0) {
      if (j->err == ENOTDIR && !stat(a->path, &st) && !S_ISDIR(st.st_mode)) return fail(j, "file_exists", EEXIST, "%.500s exists and is a %s", a->path, type_name(st.st_mode));
      return -1;
    }
  } else {
    if (place_find(j, a->path, 0, 0, &p)) return -1;
    int r = mkdirat(p.dir, p.name, 0755);
    fd = r ? -1 : open_beneath(p.dir, p.name, O_PATH | O_DIRECTORY | O_NOFOLLOW, 0);
    if (fd < 0) fail_errno(j, "make directory", a->path, NULL);
    close(p.dir);
    if (fd < 0) return -1;
  }
  int r = 0;
  if (made && a->has & HAS(T_MODE)) r = fchmodat(fd, ".", (mode_t)a->mode, 0);
  if (r) fail_errno(j, "set the mode of", a->path, NULL);
  close(fd);
  return r;
}

int op_chmod(struct job *j) {
  struct args *a = &j->a;
  struct place p;
  struct stat st;
  int r = 0;
  if (!(a->has & (HAS(T_MODE) | HAS(T_UID) | HAS(T_GID) | HAS(T_MTIME_NS)))) return fail(j, "invalid_request", 0, "chmod %.500s: nothing to set", a->path);
  if (!strcmp(a->path + strspn(a->path, "/"), "")) {             // the root has no name in a directory
    p.dir = open_beneath(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0);
    strcpy(p.name, ".");
    if (p.dir < 0) return fail_errno(j, "open", a->path, NULL);
  } else if (place_find(j, a->path, 0, 1, &p)) return -1;
  uid_t uid = a->has & HAS(T_UID) ? (uid_t)a->uid : (uid_t)-1;
  gid_t gid = a->has & HAS(T_GID) ? (gid_t)a->gid : (gid_t)-1;
  int64_t ns = (int64_t)a->mtime;
  struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = ns / 1000000000 - (ns % 1000000000 < 0), .tv_nsec = (ns % 1000000000 + 1000000000) % 1000000000}};
  r = fstatat(p.dir, p.name, &st, AT_SYMLINK_NOFOLLOW);
  if (!r && (~uid || ~gid)) r = fchownat(p.dir, p.name, uid, gid, AT_SYMLINK_NOFOLLOW);
  if (!r && a->has & HAS(T_MODE)) r = fchmodat(p.dir, p.name, (mode_t)a->mode, 0);
  if (!r && a->has & HAS(T_MTIME_NS)) r = utimensat(p.dir, p.name, times, AT_SYMLINK_NOFOLLOW);
  if (r) fail_errno(j, "change", a->path, NULL);
  close(p.dir);
  return r;
}
