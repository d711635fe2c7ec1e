// Writing tar: a POSIX pax stream of a directory or a file, as it is read, in bounded memory. The stream stays well formed whatever
// happens to the files meanwhile: a header's promise is kept with zeros or by leaving off what came later, and the answer says so.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "tar.h"

#define OCTAL7 07777777ull             // most that a 7-digit field holds
#define OCTAL11 077777777777ull

void tar_octal(char *field, size_t n, uint64_t v) {
  if (n < 22 && v >> (3 * (n - 1))) v = 0;
  field[n - 1] = 0;
  for (size_t i = n - 1; i--; v >>= 3) field[i] = (char)('0' + (v & 7));
}

void tar_sum(struct ustar *h) {
  unsigned sum = 0;
  memset(h->sum, ' ', sizeof h->sum);
  for (size_t i = 0; i < TAR_BLOCK; i++) sum += ((const uint8_t *)h)[i];
  tar_octal(h->sum, 7, sum);
}

struct pack {
  struct job *j;
  const char *base;                    // the path asked for, for messages
  struct idset links;
  struct blob names;                   // the archive names of what has more than one
  struct blob records;                 // pax records of the entry at hand
  struct segment *map;                 // data of the sparse file at hand
  size_t nmap, cap;
  char list[XATTR_LIST_MAX];
  uint8_t value[XATTR_SIZE_MAX];
};

static int no_memory(struct pack *k) { return fail(k->j, "no_memory", ENOMEM, "pack %.500s: no memory", k->base); }

static int record(struct pack *k, const char *key, const void *value, size_t n) {
  char head[320];
  size_t body = strlen(key) + n + 3, size = body + 1;            // " key=value\n", then the length with its own digits
  for (size_t digits = 1, ten = 10; size >= ten; digits++, ten *= 10) size = body + digits + 1;
  int m = snprintf(head, sizeof head, "%zu %s=", size, key);
  return blob_add(&k->records, head, (size_t)m) || blob_add(&k->records, value, n) || blob_add(&k->records, "\n", 1) ? no_memory(k) : 0;
}

static int record_number(struct pack *k, const char *key, uint64_t v) {
  char text[24];
  return record(k, key, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)v));
}

static void base_header(struct ustar *h, const char *name, char type, uint32_t mode, uint64_t size) {
  memset(h, 0, sizeof *h);
  size_t n = strlen(name);
  memcpy(h->name, name, n < sizeof h->name ? n : sizeof h->name);
  tar_octal(h->mode, sizeof h->mode, mode);
  tar_octal(h->uid, sizeof h->uid, 0);
  tar_octal(h->gid, sizeof h->gid, 0);
  tar_octal(h->size, sizeof h->size, size);
  tar_octal(h->mtime, sizeof h->mtime, 0);
  h->type = type;
  memcpy(h->magic, "ustar", 6);
  memcpy(h->version, "00", 2);
}

static int pad(struct pack *k, uint64_t n) {
  static const uint8_t zero[TAR_BLOCK];
  return n % TAR_BLOCK ? out_bytes(k->j, zero, TAR_BLOCK - n % TAR_BLOCK) : 0;
}

// The entry's header, after its pax records if it needs any.
static int header(struct pack *k, const char *name, const char *link, char type, const struct stat *st, uint64_t size) {
  struct ustar h;
  int64_t sec = st->st_mtim.tv_sec;
  long nsec = st->st_mtim.tv_nsec;
  // No hdrcharset for names that are not UTF-8: readers that know it do without, and GNU tar complains.
  if (strlen(name) > sizeof h.name && record(k, "path", name, strlen(name))) return -1;
  if (link && strlen(link) > sizeof h.link && record(k, "linkpath", link, strlen(link))) return -1;
  if (st->st_uid > OCTAL7 && record_number(k, "uid", st->st_uid)) return -1;
  if (st->st_gid > OCTAL7 && record_number(k, "gid", st->st_gid)) return -1;
  if (size > OCTAL11 && record_number(k, "size", size)) return -1;
  if (nsec || sec < 0 || (uint64_t)sec > OCTAL11) {
    char text[48];
    int minus = sec < 0;
    if (minus && nsec) { sec += 1; nsec = 1000000000 - nsec; }
    int n = snprintf(text, sizeof text, nsec ? "%s%llu.%09ld" : "%s%llu", minus ? "-" : "", (unsigned long long)(sec < 0 ? -sec : sec), nsec);
    if (record(k, "mtime", text, (size_t)n)) return -1;
  }
  if (k->records.n) {
    if (k->records.n > TAR_EXTENDED_MAX) return fail(k->j, "file_error", E2BIG, "pack %.500s/%.300s: its attributes are too large for an archive", k->base, name);
    base_header(&h, "././@PaxHeader", 'x', 0644, k->records.n);
    tar_sum(&h);
    if (out_bytes(k->j, &h, sizeof h) || out_bytes(k->j, k->records.p, k->records.n) || pad(k, k->records.n)) return -1;
    k->records.n = 0;
  }
  base_header(&h, name, type, st->st_mode & 07777, size);
  tar_octal(h.uid, sizeof h.uid, st->st_uid);
  tar_octal(h.gid, sizeof h.gid, st->st_gid);
  if (st->st_mtim.tv_sec >= 0) tar_octal(h.mtime, sizeof h.mtime, (uint64_t)st->st_mtim.tv_sec);
  if (link) memcpy(h.link, link, strnlen(link, sizeof h.link));
  tar_sum(&h);
  k->j->done++;
  return out_bytes(k->j, &h, sizeof h);
}

static int attributes(struct pack *k, int fd) {
  ssize_t n = flistxattr(fd, k->list, sizeof k->list);
  for (char *name = k->list; n > 0 && name < k->list + n; name += strlen(name) + 1) {
    char key[XATTR_NAME_MAX + 16];
    if (strncmp(name, "user.", 5) || !strncmp(name, "user.overlay.", 13) || strchr(name, '=')) continue;
    ssize_t size = fgetxattr(fd, name, k->value, sizeof k->value);
    if (size < 0) continue;            // removed meanwhile
    snprintf(key, sizeof key, "SCHILY.xattr.%.255s", name);
    if (record(k, key, k->value, (size_t)size)) return -1;
  }
  return 0;
}

// content ---------------------------------------------------------------------------------------------------------------------------

// Exactly `size` bytes from `at`, zeros for what is no longer there.
static int content(struct pack *k, int fd, const char *name, uint64_t at, uint64_t size) {
  int missing = 0;
  while (size) {
    size_t room;
    uint8_t *to = out_room(k->j, &room);
    if (room > size) room = (size_t)size;
    ssize_t n = missing ? 0 : pread(fd, to, room, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(k->j, "read", k->base, name);
    if (!n) {
      if (!missing++) note(k->j, "%.200s became shorter while it was packed: filled with zeros", name);
      memset(to, 0, room);
      n = (ssize_t)room;
    }
    if (out_add(k->j, (size_t)n)) return -1;
    at += (uint64_t)n;
    size -= (uint64_t)n;
  }
  return 0;
}

// Where the file has data. 0: worth writing as sparse (the map is in k), else plain.
static int find_holes(struct pack *k, int fd, const struct stat *st) {
  k->nmap = 0;
  if ((uint64_t)st->st_blocks * 512 >= (uint64_t)st->st_size) return -1;
  off_t end = st->st_size, at = 0;
  while (at < end) {
    off_t data = lseek(fd, at, SEEK_DATA), hole;
    if (data < 0 && errno == ENXIO) break;
    if (data < 0 || (hole = lseek(fd, data, SEEK_HOLE)) < 0) return -1;
    if (data >= end) break;
    if (hole > end) hole = end;
    if (k->nmap == k->cap) {
      size_t cap = k->cap ? k->cap * 2 : 64;
      struct segment *more = cap > TAR_SEGMENTS_MAX ? NULL : realloc(k->map, cap * sizeof *more);
      if (!more) return -1;            // very many pieces: plain
      k->map = more;
      k->cap = cap;
    }
    k->map[k->nmap++] = (struct segment){(uint64_t)data, (uint64_t)(hole - data)};
    at = hole;
  }
  return k->nmap == 1 && k->map[0].size == (uint64_t)end ? -1 : 0;
}

// GNU.sparse 1.0: the map stands as decimal lines before the data.
static int sparse(struct pack *k, int fd, const char *name, const struct stat *st) {
  struct blob map = {0};
  char line[48];
  uint64_t data = 0, real = (uint64_t)st->st_size;
  // A last empty piece carries the size for readers that look there.
  size_t count = k->nmap + 1;
  int bad = blob_add(&map, line, (size_t)snprintf(line, sizeof line, "%zu\n", count));
  for (size_t i = 0; i < count && !bad; i++) {
    struct segment s = i < k->nmap ? k->map[i] : (struct segment){real, 0};
    bad = blob_add(&map, line, (size_t)snprintf(line, sizeof line, "%llu\n%llu\n", (unsigned long long)s.offset, (unsigned long long)s.size));
    data += s.size;
  }
  static const uint8_t zero[TAR_BLOCK];
  if (!bad && map.n % TAR_BLOCK) bad = blob_add(&map, zero, TAR_BLOCK - map.n % TAR_BLOCK);
  int r = bad ? no_memory(k) : 0;
  if (!r) r = record(k, "GNU.sparse.major", "1", 1);
  if (!r) r = record(k, "GNU.sparse.minor", "0", 1);
  if (!r) r = record(k, "GNU.sparse.name", name, strlen(name));
  if (!r) r = record_number(k, "GNU.sparse.realsize", real);
  if (!r) r = header(k, name, NULL, '0', st, map.n + data);
  if (!r) r = out_bytes(k->j, map.p, map.n);
  free(map.p);
  for (size_t i = 0; i < k->nmap && !r; i++) r = content(k, fd, name, k->map[i].offset, k->map[i].size);
  return r ? -1 : pad(k, data);
}

static int regular(struct pack *k, int dir, const char *entry, const char *name) {
  struct stat st;
  int fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), r;
  if (fd < 0) return errno == ENOENT || errno == ELOOP ? 0 : fail_errno(k->j, "read", k->base, name);
  if (fstat(fd, &st) || !S_ISREG(st.st_mode)) { close(fd); return 0; }           // replaced since it was seen
  r = attributes(k, fd);
  if (!r && !find_holes(k, fd, &st)) r = sparse(k, fd, name, &st);
  else if (!r && !(r = header(k, name, NULL, '0', &st, (uint64_t)st.st_size)) && !(r = content(k, fd, name, 0, (uint64_t)st.st_size)))
    r = pad(k, (uint64_t)st.st_size);
  close(fd);
  return r;
}

// entries ---------------------------------------------------------------------------------------------------------------------------

static int excluded(const struct args *a, const char *path, const char *name) {
  for (int i = 0; i < a->nexclude; i++)
    if (!fnmatch(a->exclude[i], strchr(a->exclude[i], '/') ? path : name, 0)) return 1;
  return 0;
}

static int older(const struct args *a, const struct stat *st) {
  if (!(a->has & HAS_FROM)) return 0;
  int64_t from = (int64_t)a->from, m = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec, c = (int64_t)st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec;
  return m < from && c < from;
}

static int other(struct pack *k, int dir, const char *entry, const char *name, const struct stat *st) {
  uint64_t at;
  char target[PATH_MAX];
  if (older(&k->j->a, st)) return 0;
  int linked = st->st_nlink > 1 && !S_ISSOCK(st->st_mode), r;
  if (linked && idset_get(&k->links, st->st_dev, st->st_ino, &at)) return header(k, name, (const char *)k->names.p + at, '1', st, 0);
  uint64_t before = k->j->done;
  switch (st->st_mode & S_IFMT) {
    case S_IFREG: r = regular(k, dir, entry, name); break;
    case S_IFIFO: r = header(k, name, NULL, '6', st, 0); break;
    case S_IFLNK: {
      ssize_t n = readlinkat(dir, entry, target, sizeof target - 1);
      if (n < 0) return errno == ENOENT || errno == EINVAL ? 0 : fail_errno(k->j, "read link", k->base, name);
      target[n] = 0;
      r = header(k, name, target, '2', st, 0);
      break;
    }
    default: return 0;                 // sockets mean nothing elsewhere; devices belong to the sandbox
  }
  if (r || !linked || before == k->j->done) return r;            // only what is in the archive can be linked to
  at = k->names.n;
  return blob_add(&k->names, name, strlen(name) + 1) || idset_put(&k->links, st->st_dev, st->st_ino, at) ? no_memory(k) : 0;
}

// walk.path is the name in the archive; a directory's gets a slash behind it.
static int directory(struct pack *k, struct walk *w, int fd) {
  struct stat st;
  size_t n = strlen(w->path);
  if (fstat(fd, &st)) return fail_errno(k->j, "read", k->base, w->path);
  char *name = malloc(n + 3);
  if (!name) return no_memory(k);
  memcpy(name, n ? w->path : ".", n ? n : 1);
  memcpy(name + (n ? n : 1), "/", 2);
  int r = attributes(k, fd);
  if (!r) r = header(k, name, NULL, '5', &st, 0);
  free(name);
  return r;
}

static int tree(struct pack *k, int fd) {
  struct walk w = {0};
  struct visit v;
  struct stat st;
  int r;
  if (walk_start(&w, fd)) return fail_errno(k->j, "pack", k->base, NULL);
  if ((r = directory(k, &w, fd))) goto out;
  while ((r = walk_next(&w, &v)) != WALK_END) {
    if (r < 0) { fail_errno(k->j, "pack", k->base, w.path); goto out; }
    if (r == WALK_LEAVE || excluded(&k->j->a, w.path, v.name)) continue;
    r = -1;
    if (fstatat(v.dir, v.name, &st, AT_SYMLINK_NOFOLLOW)) {
      if (errno == ENOENT) continue;
      fail_errno(k->j, "pack", k->base, w.path);
      goto out;
    }
    if (!S_ISDIR(st.st_mode)) {
      if (other(k, v.dir, v.name, w.path, &st)) goto out;
      continue;
    }
    int pseudo = walk_pseudo(&w, &v, &st);
    if (walk_enter(&w, &fd)) {
      if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) continue;       // replaced since
      fail_errno(k->j, "pack", k->base, w.path);
      goto out;
    }
    if (directory(k, &w, fd)) goto out;
    if (pseudo) walk_skip(&w);
  }
out:
  walk_stop(&w);
  return r;
}

int op_tar(struct job *j) {
  struct pack *k = calloc(1, sizeof *k);
  struct place p;
  struct stat st;
  static const uint8_t end[2 * TAR_BLOCK];
  if (!k) return fail(j, "no_memory", ENOMEM, "pack %.500s: no memory", j->a.path);
  k->j = j;
  k->base = j->a.path;
  int fd = open_beneath(AT_FDCWD, j->a.path, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0), r = -1;
  if (fd >= 0) r = tree(k, fd);
  else if (errno != ENOTDIR) fail_errno(j, "pack", j->a.path, NULL);
  else if (!place_find(j, j->a.path, 0, 1, &p)) {
    // One file, by the name that the path gives it, even where that is a link to it.
    const char *name = strrchr(j->a.path, '/') + 1;
    if (fstatat(p.dir, p.name, &st, AT_SYMLINK_NOFOLLOW)) fail_errno(j, "pack", j->a.path, NULL);
    else if (!S_ISREG(st.st_mode)) kind_error(j, st.st_mode, j->a.path);
    else if (!*name) { errno = ENOTDIR; fail_errno(j, "pack", j->a.path, NULL); }
    else r = regular(k, p.dir, p.name, name);
    close(p.dir);
  }
  if (!r) r = out_bytes(j, end, sizeof end);
  if (!r) r = out_flush(j);
  idset_free(&k->links);
  free(k->names.p);
  free(k->records.p);
  free(k->map);
  free(k);
  j->size = j->sent;
  j->reports = REPORT_SIZE | REPORT_DONE;
  return r;
}
