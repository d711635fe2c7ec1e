// Whole trees: remove, move, and the copy that a move needs where a rename cannot do it (another mount; a directory of a lower layer).
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "files.h"

#define AGAIN 64                       // passes over a directory that somebody keeps filling while it is removed

static int is_dir(int dir, const char *name) {
  struct stat st;
  return !fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode);
}

// remove ----------------------------------------------------------------------------------------------------------------------------

static int empty_dir(struct job *j, int fd, const char *path) {
  struct walk w = {.rewind = 1};
  struct visit v;
  int r, again = 0;
  if (walk_start(&w, fd)) return fail_errno(j, "remove", path, NULL);
  while ((r = walk_next(&w, &v)) != WALK_END) {
    if (r < 0) break;
    if (r == WALK_LEAVE) {
      if (!unlinkat(v.dir, v.name, AT_REMOVEDIR) || errno == ENOENT) continue;
      if ((errno != ENOTEMPTY && errno != EEXIST) || again++ == AGAIN) { r = -1; break; }
    } else if (v.type != DT_DIR) {
      if (!unlinkat(v.dir, v.name, 0) || errno == ENOENT) continue;
      if (errno != EISDIR && errno != EPERM) { r = -1; break; }
      if (!is_dir(v.dir, v.name)) { errno = EPERM; r = -1; break; }
    }
    if (!walk_enter(&w, NULL)) continue;
    if (errno == ENOENT || ((errno == ENOTDIR || errno == ELOOP) && (!unlinkat(v.dir, v.name, 0) || errno == ENOENT))) continue;
    r = -1;
    break;
  }
  if (r) fail_errno(j, "remove", path, w.path);
  walk_stop(&w);
  return r;
}

int remove_tree(struct job *j, int dir, const char *name, const char *path) {
  for (int i = 0;; i++) {
    if (!unlinkat(dir, name, 0)) return 0;
    if ((errno != EISDIR && errno != EPERM) || !is_dir(dir, name)) return fail_errno(j, "remove", path, NULL);
    if (!unlinkat(dir, name, AT_REMOVEDIR)) return 0;
    if ((errno != ENOTEMPTY && errno != EEXIST) || i == AGAIN) return fail_errno(j, "remove", path, NULL);
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return fail_errno(j, "remove", path, NULL);
    if (empty_dir(j, fd, path)) return -1;
  }
}

int op_remove(struct job *j) {
  struct args *a = &j->a;
  struct place p;
  if (place_find(j, a->path, 0, 0, &p)) return -1;
  int r = 0;
  if (a->recursive) r = remove_tree(j, p.dir, p.name, a->path);
  else if (unlinkat(p.dir, p.name, is_dir(p.dir, p.name) ? AT_REMOVEDIR : 0)) r = fail_errno(j, "remove", a->path, NULL);
  close(p.dir);
  return r;
}

// copy ------------------------------------------------------------------------------------------------------------------------------

static int copy_range(int in, int out, off_t from, off_t end) {
  static uint8_t block[128 << 10];
  off_t to = from;
  while (from < end) {
    ssize_t n = copy_file_range(in, &from, out, &to, (size_t)(end - from), 0);
    if (n > 0) continue;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EXDEV && errno != EINVAL && errno != EOPNOTSUPP && errno != ENOSYS && errno != EPERM && errno != EBADF) return -1;
    n = pread(in, block, (size_t)(end - from) < sizeof block ? (size_t)(end - from) : sizeof block, from);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (!n) return 0;                  // shorter than it was
    from += n;
    for (ssize_t done = 0; done < n;) {
      ssize_t w = pwrite(out, block + done, (size_t)(n - done), to);
      if (w < 0 && errno != EINTR) return -1;
      if (w > 0) { done += w; to += w; }
    }
  }
  return 0;
}

int copy_content(int in, int out, uint64_t size) {
  off_t at = 0, end = (off_t)size;
  while (at < end) {
    off_t data = lseek(in, at, SEEK_DATA), hole;
    if (data < 0 && errno == ENXIO) break;                       // only a hole from here on
    if (data < 0) { data = at; hole = end; }                     // a file system that does not know
    else if ((hole = lseek(in, data, SEEK_HOLE)) < 0) hole = end;
    if (hole > end) hole = end;
    if (copy_range(in, out, data, hole)) return -1;
    at = hole;
  }
  return ftruncate(out, end);
}

void copy_xattrs(int in, int out) {
  char *names = malloc(XATTR_LIST_MAX), *value = malloc(XATTR_SIZE_MAX);
  ssize_t n = names && value ? flistxattr(in, names, XATTR_LIST_MAX) : -1;
  for (char *name = names; n > 0 && name < names + n; name += strlen(name) + 1) {
    // What only the kernel or the overlay may write, and what a changed content must lose.
    if (!strncmp(name, "trusted.", 8) || !strncmp(name, "security.", 9) || !strncmp(name, "user.overlay.", 13)) continue;
    ssize_t size = fgetxattr(in, name, value, XATTR_SIZE_MAX);
    if (size >= 0) fsetxattr(out, name, value, (size_t)size, 0);
  }
  free(names);
  free(value);
}

struct copy { struct job *j; const char *from, *to; struct idset links; struct blob names; };

// Attributes last, and the mode after the owner: chown clears set-id bits.
static int attributes(int in, int out, const struct stat *st) {
  if (in >= 0) copy_xattrs(in, out);
  struct timespec times[2] = {st->st_atim, st->st_mtim};
  if (fchown(out, st->st_uid, st->st_gid) && !geteuid()) return -1;    // an ordinary user cannot give files away; as with mv, they become his
  return fchmod(out, st->st_mode & 07777) || futimens(out, times) ? -1 : 0;
}

static int copy_file(int dir, const char *name, int to, const char *as, const struct stat *st) {
  struct stat now;
  int in = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), out = -1, r = -1;
  if (in < 0) return -1;
  if (!fstat(in, &now) && !S_ISREG(now.st_mode)) errno = ESTALE;
  else if ((out = openat(to, as, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)) >= 0)
    r = copy_content(in, out, (uint64_t)now.st_size) || attributes(in, out, st) ? -1 : 0;
  int err = errno;
  close(in);
  if (out >= 0) close(out);
  errno = err;
  return r;
}

// Anything but a directory, as `as` in the directory `to`. root, rel: where hard links of this copy are found again.
static int copy_entry(struct copy *c, int dir, const char *name, int to, const char *as, const struct stat *st, int root, const char *rel) {
  uint64_t at;
  if (st->st_nlink > 1 && root >= 0) {
    if (idset_get(&c->links, st->st_dev, st->st_ino, &at)) {
      const char *first = (const char *)c->names.p + at;
      if (strlen(first) < PATH_MAX && !linkat(root, first, to, as, 0)) return 0;   // else a copy of its own
    } else {
      at = c->names.n;
      if (blob_add(&c->names, rel, strlen(rel) + 1) || idset_put(&c->links, st->st_dev, st->st_ino, at)) { errno = ENOMEM; return -1; }
    }
  }
  if (S_ISREG(st->st_mode)) return copy_file(dir, name, to, as, st);
  struct timespec times[2] = {st->st_atim, st->st_mtim};
  char target[PATH_MAX];
  if (S_ISLNK(st->st_mode)) {
    ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
    if (n < 0) return -1;
    target[n] = 0;
    if (symlinkat(target, to, as)) return -1;
  } else if (mknodat(to, as, st->st_mode, st->st_rdev)) return -1;   // fifo, socket; a device where the kernel lets us
  if (fchownat(to, as, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW) && !geteuid()) return -1;
  if (!S_ISLNK(st->st_mode) && fchmodat(to, as, st->st_mode & 07777, 0)) return -1;
  return utimensat(to, as, times, AT_SYMLINK_NOFOLLOW);
}

static int copy_tree(struct copy *c, int dir, const char *name, int to, const char *as, const struct stat *st) {
  struct walk w = {0};
  struct visit v;
  struct stat now;
  int fd, r = -1, root = -1;
  if ((fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) < 0) return fail_errno(c->j, "copy", c->from, NULL);
  if (walk_start(&w, fd)) return fail_errno(c->j, "copy", c->from, NULL);
  if (mkdirat(to, as, 0700) || (root = openat(to, as, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0) { fail_errno(c->j, "make directory", c->to, NULL); goto out; }
  walk_peer(&w, dup(root));
  while ((r = walk_next(&w, &v)) != WALK_END) {
    if (r < 0) goto bad;
    if (r == WALK_LEAVE) continue;
    if (fstatat(v.dir, v.name, &now, AT_SYMLINK_NOFOLLOW)) { if (errno == ENOENT) continue; goto bad; }
    if (!S_ISDIR(now.st_mode)) {
      if (copy_entry(c, v.dir, v.name, v.peer, v.name, &now, root, w.path)) goto bad;
      continue;
    }
    if (walk_enter(&w, NULL)) goto bad;
    const char *base = strrchr(w.path, '/');
    base = base ? base + 1 : w.path;
    int peer = v.peer, child;
    if (mkdirat(peer, base, 0700) || (child = openat(peer, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0) goto bad;
    walk_peer(&w, child);
  }
  // Attributes of directories once all is in them: writing into one changes its time, and a read-only one takes no entries.
  walk_stop(&w);
  r = -1;
  if ((fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) < 0 || walk_start(&w, fd)) goto bad;
  walk_peer(&w, dup(root));
  while ((r = walk_next(&w, &v)) != WALK_END) {
    if (r < 0) goto bad;
    if (r == WALK_ENTRY) {
      if (fstatat(v.dir, v.name, &now, AT_SYMLINK_NOFOLLOW) || !S_ISDIR(now.st_mode)) continue;
      const char *base = v.name;
      int child = openat(v.peer, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (child < 0) { if (errno == ENOENT) continue; goto bad; }
      if (walk_enter(&w, NULL)) { close(child); goto bad; }
      walk_peer(&w, child);
      continue;
    }
    int in = openat(v.dir, v.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), out = openat(v.peer, v.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int bad = in < 0 || out < 0 || fstat(in, &now) || attributes(in, out, &now), err = errno;
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    errno = err;
    if (bad) goto bad;
  }
  r = attributes(w.levels[0].fd, root, st);
  if (!r) goto out;
bad:
  fail_errno(c->j, "copy", c->from, w.path);
  r = -1;
out:
  walk_stop(&w);
  if (root >= 0) close(root);
  return r;
}

// move ------------------------------------------------------------------------------------------------------------------------------

// Where rename says EXDEV: copy to a temporary name beside the destination, rename that, and only then remove the source, so that a
// failure (no space, say) leaves the source whole and nothing half-made behind.
static int move_by_copy(struct job *j, struct place *from, struct place *to, unsigned flags) {
  struct args *a = &j->a;
  struct stat st, beside, inside;
  char temp[32];
  if (fstatat(from->dir, from->name, &st, AT_SYMLINK_NOFOLLOW)) return fail_errno(j, "move", a->path, NULL);
  // Not into itself: the walk would follow its own copy for ever.
  if (S_ISDIR(st.st_mode)) {
    int up = open_beneath(to->dir, ".", O_PATH | O_DIRECTORY, 0);
    for (int first = 1; up >= 0; first = 0) {
      if (fstat(up, &beside)) break;
      if (beside.st_dev == st.st_dev && beside.st_ino == st.st_ino) { close(up); return fail(j, "file_error", EINVAL, "move %.500s into itself (%.500s)", a->path, a->dest); }
      if (!first && inside.st_dev == beside.st_dev && inside.st_ino == beside.st_ino) break;   // the root
      inside = beside;
      int next = open_beneath(up, "..", O_PATH | O_DIRECTORY, 0);
      close(up);
      up = next;
    }
    if (up >= 0) close(up);
  }
  if (!fstatat(to->dir, to->name, &inside, AT_SYMLINK_NOFOLLOW)) {
    if (flags & RENAME_NOREPLACE) return fail(j, "file_exists", EEXIST, "%.500s exists", a->dest);
    if (S_ISDIR(inside.st_mode) && !S_ISDIR(st.st_mode)) return kind_error(j, inside.st_mode, a->dest);
    if (!S_ISDIR(inside.st_mode) && S_ISDIR(st.st_mode)) { errno = ENOTDIR; return fail_errno(j, "move to", a->dest, NULL); }
  }
  struct copy c = {.j = j, .from = a->path, .to = a->dest};
  temp_name(temp);
  int r = S_ISDIR(st.st_mode) ? copy_tree(&c, from->dir, from->name, to->dir, temp, &st) : copy_entry(&c, from->dir, from->name, to->dir, temp, &st, -1, "");
  if (r && !j->code) fail_errno(j, "copy", a->path, NULL);
  if (!r && renameat2(to->dir, temp, to->dir, to->name, flags)) {
    r = errno == ENOTEMPTY ? fail(j, "file_exists", ENOTEMPTY, "%.500s is a directory that is not empty", a->dest) : fail_errno(j, "move to", a->dest, NULL);
  }
  idset_free(&c.links);
  free(c.names.p);
  if (r) {
    struct job side = {0};             // the first error stands
    remove_tree(&side, to->dir, temp, a->dest);
    return -1;
  }
  return remove_tree(j, from->dir, from->name, a->path);
}

int op_move(struct job *j) {
  struct args *a = &j->a;
  struct place from, to;
  unsigned flags = a->overwrite ? 0 : RENAME_NOREPLACE;
  if (!a->dest) return fail(j, "invalid_request", 0, "move %.500s: no destination", a->path);
  if (place_find(j, a->path, 0, 0, &from)) return -1;
  if (place_find(j, a->dest, a->parents != 0, 0, &to)) { close(from.dir); return -1; }
  int r = 0;
  if (renameat2(from.dir, from.name, to.dir, to.name, flags)) {
    if (errno == EXDEV) r = move_by_copy(j, &from, &to, flags);
    else if (errno == ENOTEMPTY || errno == EEXIST) r = fail(j, "file_exists", errno, "%.500s exists", a->dest);
    else if (errno == EINVAL) r = fail(j, "file_error", EINVAL, "move %.500s into itself (%.500s)", a->path, a->dest);
    else if (errno == ENOTDIR || errno == EISDIR) r = fail_errno(j, "move to", a->dest, NULL);
    else r = fail_errno(j, "move", a->path, NULL);
  }
  close(from.dir);
  close(to.dir);
  return r;
}
