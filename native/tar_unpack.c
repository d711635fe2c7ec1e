// Extracting a tar stream below one directory. Nothing lands outside it: absolute names and ".." are refused, every directory on the way
// is opened beneath the root without following links, and where a link stands in the way it is followed only if it was there before this
// archive, and only to a place below the root. Owners, modes and times of directories are set at the end, deepest first.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "tar.h"

#define INSIDE (RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)
#define LINKS 40

struct late { size_t path; uint32_t mode, uid, gid, nsec; int64_t mtime; uint64_t dev, ino; };   // a directory to finish at the end

struct unpack {
  struct job *j;
  struct tar t;
  int root, fresh, at_slash, own;      // at_slash: root is "/", so that absolute links stay in it; own: we are root and give owners
  struct idset links;                  // symlinks that this archive made
  struct idset dirs;                   // directories in `late`
  struct blob late, paths;
  char *parent;                        // the directory opened last, and its descriptor
  int dir;
  char *work;                          // a cleaned name, grown as needed
  size_t cap;
};

static int refuse(struct unpack *u, const char *why) { return fail(u->j, "file_error", EINVAL, "archive entry %.400s: %s", u->t.entry.name, why); }

static int refuse_errno(struct unpack *u, const char *verb) {
  int err = errno;
  return fail(u->j, code_of(err), err, "archive entry %.400s: %s: %s", u->t.entry.name, verb, strerror(err));
}

// names -----------------------------------------------------------------------------------------------------------------------------

// The name without ".", empty parts and trailing slashes, in u->work; "" is the root itself.
static int clean(struct unpack *u, const char *name, const char *what) {
  size_t n = strlen(name) + 1;
  if (n > u->cap) {
    char *more = realloc(u->work, n);
    if (!more) return fail(u->j, "no_memory", ENOMEM, "archive: no memory for a name of %zu bytes", n);
    u->work = more;
    u->cap = n;
  }
  if (name[0] == '/') return fail(u->j, "file_error", EINVAL, "archive entry %.400s: %s is absolute", u->t.entry.name, what);
  char *to = u->work;
  for (const char *p = name; *p;) {
    size_t m = strcspn(p, "/");
    if (m == 2 && p[0] == '.' && p[1] == '.') return fail(u->j, "file_error", EINVAL, "archive entry %.400s: %s has a \"..\"", u->t.entry.name, what);
    if (m && !(m == 1 && p[0] == '.')) {
      if (to != u->work) *to++ = '/';
      memmove(to, p, m);
      to += m;
    }
    p += m;
    p += *p == '/';
  }
  *to = 0;
  return 0;
}

// A directory below the root by a path of any length, without links.
static int open_plain(struct unpack *u, const char *path, int flags) {
  int dir = u->root;
  for (;;) {
    size_t n = strlen(path);
    char part[PATH_MAX];
    int last = n < PATH_MAX;
    if (!last) {
      n = PATH_MAX - 1;
      while (n && path[n] != '/') n--;
      if (!n) { errno = ENAMETOOLONG; last = 2; }
    }
    memcpy(part, path, n);
    part[n] = 0;
    int fd = last == 2 ? -1 : open_beneath(dir, n ? part : ".", last ? flags : O_PATH | O_DIRECTORY, INSIDE);
    int err = errno;
    if (dir != u->root) close(dir);
    errno = err;
    if (fd < 0 || last) return fd;
    dir = fd;
    path += n + 1;
  }
}

// The long way: part by part, making what is missing and looking at every link. `path` is relative and clean. Where we are is known as a
// path without links (`at`), so that ".." of a link's target needs no trust in the tree.
static int walk_to(struct unpack *u, const char *path, int make) {
  struct blob at = {0}, rest = {0};
  int fd = -1, links = 0, err = ENOMEM;
  if (blob_add(&at, "", 1) || blob_add(&rest, path, strlen(path) + 1)) goto out;
  for (size_t pos = 0;;) {
    char *p = (char *)rest.p + pos;
    p += strspn(p, "/");
    size_t m = strcspn(p, "/"), keep = at.n - 1;
    if (!m) break;
    pos = (size_t)(p - (char *)rest.p) + m;
    if (m == 1 && p[0] == '.') continue;
    if (m == 2 && p[0] == '.' && p[1] == '.') {
      if (!keep) { refuse(u, "a link on its way leads out of the directory"); goto out; }
      while (keep && at.p[keep - 1] != '/') keep--;
      if (keep) keep--;
      at.p[keep] = 0;
      at.n = keep + 1;
      continue;
    }
    at.n--;
    if ((keep && blob_add(&at, "/", 1)) || blob_add(&at, p, m) || blob_add(&at, "", 1)) goto out;
    struct stat st;
    char target[PATH_MAX];
    if (fd >= 0) close(fd);
    fd = open_plain(u, (char *)at.p, O_PATH | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT && make) {
      // its directory was seen a moment ago
      at.p[keep] = 0;
      int above = open_plain(u, (char *)at.p, O_PATH | O_DIRECTORY);
      if (keep) at.p[keep] = '/';
      else memcpy(at.p, p, m);         // its first byte was the terminator
      if (above < 0 || (mkdirat(above, (char *)at.p + (keep ? keep + 1 : 0), 0755) && errno != EEXIST)) { err = errno; if (above >= 0) close(above); goto out; }
      close(above);
      fd = open_plain(u, (char *)at.p, O_PATH | O_NOFOLLOW);
    }
    if (fd < 0 || fstat(fd, &st)) { err = errno; goto out; }
    if (S_ISDIR(st.st_mode)) continue;
    if (!S_ISLNK(st.st_mode)) { err = ENOTDIR; goto out; }
    if (idset_get(&u->links, st.st_dev, st.st_ino, NULL)) { refuse(u, "it leads through a link that the archive made"); goto out; }
    ssize_t n = readlinkat(fd, "", target, sizeof target - 1);
    if (n < 0) { err = errno; goto out; }
    if (++links > LINKS) { err = ELOOP; goto out; }
    target[n] = 0;
    if (target[0] == '/' && !u->at_slash) { refuse(u, "a link on its way leads out of the directory"); goto out; }
    struct blob next = {0};
    if (blob_add(&next, target, (size_t)n) || blob_add(&next, (char *)rest.p + pos, strlen((char *)rest.p + pos) + 1)) { free(next.p); goto out; }
    free(rest.p);
    rest = next;
    pos = 0;
    if (target[0] == '/') keep = 0;
    at.p[keep] = 0;
    at.n = keep + 1;
  }
  if (fd >= 0) close(fd);
  fd = open_plain(u, (char *)at.p, O_PATH | O_DIRECTORY);
  err = errno;
  free(at.p);
  free(rest.p);
  errno = err;
  return fd < 0 ? refuse_errno(u, "open its directory") : fd;
out:
  if (fd >= 0) close(fd);
  free(at.p);
  free(rest.p);
  if (!u->j->code) { errno = err; refuse_errno(u, "open its directory"); }
  return -1;
}

// Opens the directory of the clean name in `name`; *base: its last part. The descriptor is kept for the next entry.
static int parent_of(struct unpack *u, char *name, const char **base) {
  char *slash = strrchr(name, '/');
  *base = slash ? slash + 1 : name;
  if (strlen(*base) > NAME_MAX) { errno = ENAMETOOLONG; return refuse_errno(u, "make"); }
  if (slash) *slash = 0;
  const char *dir = slash ? name : "";
  if (!u->parent || strcmp(u->parent, dir)) {
    free(u->parent);
    u->parent = NULL;
    if (u->dir >= 0) close(u->dir);
    u->dir = open_plain(u, dir, O_PATH | O_DIRECTORY);
    if (u->dir < 0 && (u->dir = walk_to(u, dir, 1)) < 0) return -1;
    u->parent = strdup(dir);
    if (!u->parent) return fail(u->j, "no_memory", ENOMEM, "archive: no memory for a name");
  }
  if (slash) *slash = '/';
  return u->dir;
}

// entries ---------------------------------------------------------------------------------------------------------------------------

// Takes away what stands at the name, unless it is a directory. It may be a link that the directory opened last was reached through.
static int clear(struct unpack *u, int dir, const char *base) {
  free(u->parent);
  u->parent = NULL;
  if (!unlinkat(dir, base, 0) || errno == ENOENT) return 0;
  if (errno == EISDIR || errno == EPERM) {
    struct stat st;
    if (!fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode))
      return fail(u->j, "is_a_directory", EISDIR, "archive entry %.400s: a directory is in its place", u->t.entry.name);
    errno = EPERM;
  }
  return refuse_errno(u, "replace");
}

static void owner_of(const struct unpack *u, uint32_t *uid, uint32_t *gid) {
  *uid = u->j->a.has & HAS(T_UID) ? (uint32_t)u->j->a.uid : u->t.entry.uid;
  *gid = u->j->a.has & HAS(T_GID) ? (uint32_t)u->j->a.gid : u->t.entry.gid;
}

// EINVAL: the sandbox has no such number (its range ends at 65535); the file stays its user's.
static int own(struct unpack *u, int dir, const char *base) {
  uint32_t uid, gid;
  if (!u->own) return 0;
  owner_of(u, &uid, &gid);
  if (!fchownat(dir, base, uid, gid, AT_SYMLINK_NOFOLLOW | (*base ? 0 : AT_EMPTY_PATH)) || errno == EINVAL || errno == EOVERFLOW) return 0;
  return refuse_errno(u, "set its owner");
}

static int set_xattrs(struct unpack *u, int fd) {
  char name[256];
  const uint8_t *value;
  size_t n;
  while (tar_xattr(&u->t, name, &value, &n))
    if (fsetxattr(fd, name, value, n, 0) && errno != EOPNOTSUPP) return refuse_errno(u, "set its attributes");
  return 0;
}

static int write_at(struct unpack *u, int fd, const uint8_t *p, size_t n, uint64_t at) {
  while (n) {
    ssize_t w = pwrite(fd, p, n, (off_t)at);
    if (w < 0 && errno == EINTR) continue;
    if (w < 0) return refuse_errno(u, "write");
    p += w;
    n -= (size_t)w;
    at += (uint64_t)w;
  }
  return 0;
}

// The reader's error, or the connection's, which in_peek() has written down already.
static int reader_error(struct unpack *u) { return u->t.error[0] ? fail(u->j, "file_error", EINVAL, "%s", u->t.error) : -1; }

static int make_file(struct unpack *u, int dir, const char *base) {
  struct tar_entry *e = &u->t.entry;
  int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, r;
  int fd = openat(dir, base, flags, 0600);
  if (fd < 0 && errno == EEXIST) {
    if (clear(u, dir, base)) return -1;
    fd = openat(dir, base, flags, 0600);
  }
  if (fd < 0) return refuse_errno(u, "make");
  const uint8_t *p;
  size_t n;
  uint64_t at, end = 0;
  while ((r = tar_data(&u->t, &p, &n, &at)) > 0) {
    if (write_at(u, fd, p, n, at)) { r = -2; break; }
    end = at + n;
    tar_eat(&u->t, n);
  }
  if (r == -1) reader_error(u);
  if (!r && end < e->size && ftruncate(fd, (off_t)e->size)) r = refuse_errno(u, "set its size");
  struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = e->mtime, .tv_nsec = e->nsec}};
  if (!r) r = own(u, fd, "");
  if (!r) r = set_xattrs(u, fd);
  if (!r && fchmod(fd, e->mode)) r = refuse_errno(u, "set its mode");
  if (!r && futimens(fd, times)) r = refuse_errno(u, "set its time");
  close(fd);
  if (r) unlinkat(dir, base, 0);       // no half file under its real name
  return r ? -1 : 0;
}

static int later(struct unpack *u, const char *path, const struct stat *st) {
  struct tar_entry *e = &u->t.entry;
  struct late l = {.path = u->paths.n, .mode = e->mode, .mtime = e->mtime, .nsec = e->nsec, .dev = st->st_dev, .ino = st->st_ino};
  uint64_t index;
  owner_of(u, &l.uid, &l.gid);
  if (idset_get(&u->dirs, l.dev, l.ino, &index)) {               // named twice: the later one counts
    struct late *old = (struct late *)u->late.p + index;
    l.path = old->path;
    *old = l;
    return 0;
  }
  index = u->late.n / sizeof l;
  if (idset_put(&u->dirs, l.dev, l.ino, index) || blob_add(&u->late, &l, sizeof l) || blob_add(&u->paths, path, strlen(path) + 1))
    return fail(u->j, "no_memory", ENOMEM, "archive: no memory for so many directories");
  return 0;
}

static int make_directory(struct unpack *u, char *name) {
  struct stat st;
  const char *base = "";
  int dir = u->root, fd;
  if (!*name) {
    if (!u->fresh) return 0;           // a directory that was there keeps its own mode, owner and time
    fd = open_beneath(u->root, ".", O_RDONLY | O_DIRECTORY, INSIDE);
  } else {
    if ((dir = parent_of(u, name, &base)) < 0) return -1;
    int made = !mkdirat(dir, base, 0700);
    if (!made && errno != EEXIST) return refuse_errno(u, "make");
    if (!made && !fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW) && !S_ISDIR(st.st_mode)) {
      if (S_ISLNK(st.st_mode) && !idset_get(&u->links, st.st_dev, st.st_ino, NULL)) {
        // A link that was there before (/lib of a merged /usr): where it leads to a directory in here, that is the directory.
        int there = walk_to(u, name, 0);
        if (there >= 0) { close(there); return 0; }
        u->j->code = NULL;
      }
      if (clear(u, dir, base)) return -1;
      if (mkdirat(dir, base, 0700)) return refuse_errno(u, "make");
    }
    fd = openat(dir, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == EACCES) {   // ours but closed to us
      if (!fchmodat(dir, base, 0700, 0)) fd = openat(dir, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
  }
  if (fd < 0) return refuse_errno(u, "open");
  int r = fstat(fd, &st) ? refuse_errno(u, "open") : set_xattrs(u, fd) ? -1 : later(u, name, &st);
  close(fd);
  return r;
}

static int make_link(struct unpack *u, int dir, const char *base) {
  struct stat st;
  struct tar_entry *e = &u->t.entry;
  if (!*e->link) return refuse(u, "a link without a target");
  if (symlinkat(e->link, dir, base)) {
    if (errno != EEXIST) return refuse_errno(u, "make");
    if (clear(u, dir, base)) return -1;
    if (symlinkat(e->link, dir, base)) return refuse_errno(u, "make");
  }
  if (fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW)) return refuse_errno(u, "make");
  if (idset_put(&u->links, st.st_dev, st.st_ino, 0)) return fail(u->j, "no_memory", ENOMEM, "archive: no memory for so many links");
  struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = e->mtime, .tv_nsec = e->nsec}};
  if (own(u, dir, base)) return -1;
  return utimensat(dir, base, times, AT_SYMLINK_NOFOLLOW) ? refuse_errno(u, "set its time") : 0;
}

static int make_hard_link(struct unpack *u) {
  const char *base, *target_base;
  if (clean(u, u->t.entry.link, "its target")) return -1;
  if (!*u->work) return refuse(u, "a hard link to the directory itself");
  int from = parent_of(u, u->work, &target_base);
  if (from < 0) return -1;
  char target[NAME_MAX + 1];
  strcpy(target, target_base);
  if ((from = open_beneath(from, ".", O_PATH | O_DIRECTORY, INSIDE)) < 0) return refuse_errno(u, "open its target");
  int dir = clean(u, u->t.entry.name, "its name") || !*u->work ? -1 : parent_of(u, u->work, &base), r = -1;
  struct stat a, b;
  if (dir >= 0) {
    r = linkat(from, target, dir, base, 0);
    if (r && errno == EEXIST) {
      // The same file already (an archive unpacked twice) must not be cleared away from under itself.
      if (!fstatat(from, target, &a, AT_SYMLINK_NOFOLLOW) && !fstatat(dir, base, &b, AT_SYMLINK_NOFOLLOW) && a.st_dev == b.st_dev && a.st_ino == b.st_ino) r = 0;
      else if ((r = clear(u, dir, base)) == 0) r = linkat(from, target, dir, base, 0);
    }
    if (r && !u->j->code) {
      int err = errno;
      r = fail(u->j, code_of(err), err, "archive entry %.300s: link to %.300s: %s", u->t.entry.name, u->t.entry.link, strerror(err));
    }
  } else if (!u->j->code) refuse(u, "a hard link in place of the directory itself");
  close(from);
  return r;
}

static int make_node(struct unpack *u, int dir, const char *base) {
  struct tar_entry *e = &u->t.entry;
  mode_t kind = e->type == '6' ? S_IFIFO : e->type == '3' ? S_IFCHR : S_IFBLK;
  dev_t dev = kind == S_IFIFO ? 0 : makedev(e->major, e->minor);
  if (mknodat(dir, base, kind | 0600, dev)) {
    if (errno == EEXIST) {
      if (clear(u, dir, base)) return -1;
      if (!mknodat(dir, base, kind | 0600, dev)) goto made;
    }
    return refuse_errno(u, kind == S_IFIFO ? "make" : "make a device");
  }
made:;
  struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = e->mtime, .tv_nsec = e->nsec}};
  if (own(u, dir, base)) return -1;
  if (fchmodat(dir, base, e->mode, 0)) return refuse_errno(u, "set its mode");
  return utimensat(dir, base, times, AT_SYMLINK_NOFOLLOW) ? refuse_errno(u, "set its time") : 0;
}

static int entry(struct unpack *u) {
  struct tar_entry *e = &u->t.entry;
  const char *base;
  if (e->type == '1') return make_hard_link(u);
  if (clean(u, e->name, "its name")) return -1;
  if (e->type == '5') return make_directory(u, u->work);
  if (!*u->work) return refuse(u, "it is not a directory but names the directory itself");
  int dir = parent_of(u, u->work, &base);
  if (dir < 0) return -1;
  if (e->type == '0') return make_file(u, dir, base);
  return e->type == '2' ? make_link(u, dir, base) : make_node(u, dir, base);
}

static int finish_directories(struct unpack *u) {
  for (size_t i = u->late.n / sizeof(struct late); i--;) {
    const struct late *l = (struct late *)u->late.p + i;
    const char *path = (const char *)u->paths.p + l->path;
    struct stat st;
    struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = l->mtime, .tv_nsec = l->nsec}};
    int fd = open_plain(u, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &st) || st.st_dev != l->dev || st.st_ino != l->ino) {
      // Through a link that was there before, the path is not plain: found again the long way.
      if (fd >= 0) close(fd);
      u->t.entry.name = path;
      int again = walk_to(u, path, 0);
      u->j->code = NULL;
      fd = again < 0 ? -1 : open_beneath(again, ".", O_RDONLY | O_DIRECTORY, INSIDE);
      if (again >= 0) close(again);
      if (fd < 0) continue;            // replaced by a later entry, or by somebody inside
      if (fstat(fd, &st) || st.st_dev != l->dev || st.st_ino != l->ino) { close(fd); continue; }
    }
    int r = u->own && fchown(fd, l->uid, l->gid) && errno != EINVAL && errno != EOVERFLOW;
    r = r || fchmod(fd, l->mode) || futimens(fd, times);
    if (r) {
      u->t.entry.name = path;
      refuse_errno(u, "set the attributes of the directory");
    }
    close(fd);
    if (r) return -1;
  }
  return 0;
}

static int peek(void *j, const uint8_t **p, size_t *n) { return in_peek(j, p, n); }
static void eat(void *j, size_t n) { in_eat(j, n); }

int unpack(struct job *j, int root, int fresh, int at_slash) {
  struct unpack u = {.j = j, .root = root, .fresh = fresh, .at_slash = at_slash, .own = !geteuid(), .dir = -1, .t = {.peek = peek, .eat = eat, .arg = j}};
  const uint8_t *p;
  size_t n;
  int r;
  umask(022);
  while ((r = tar_next(&u.t)) > 0) {
    if ((r = entry(&u))) break;
    j->done++;
  }
  if (r < 0 && !j->code) reader_error(&u);
  // What stands behind the end-of-archive mark (padding to a record) is the archive's too.
  while (!r && (r = in_peek(j, &p, &n)) > 0) { in_eat(j, n); r = 0; }
  if (!r) r = finish_directories(&u);
  tar_free(&u.t);
  idset_free(&u.links);
  idset_free(&u.dirs);
  free(u.late.p);
  free(u.paths.p);
  free(u.parent);
  free(u.work);
  if (u.dir >= 0) close(u.dir);
  return r ? -1 : 0;
}

int op_untar(struct job *j) {
  struct stat root, slash;
  int made = 0, fd = make_dir(j, j->a.path, j->a.parents != 0, &made);
  if (fd < 0) return -1;
  int at_slash = !fstat(fd, &root) && !stat("/", &slash) && root.st_dev == slash.st_dev && root.st_ino == slash.st_ino;
  int r = unpack(j, fd, made, at_slash);
  close(fd);
  j->size = j->received;
  j->reports = REPORT_SIZE | REPORT_DONE;
  return r;
}
