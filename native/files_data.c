// The content of one file: read, write.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "files.h"

#define ENDLESS_MAX (64u << 20)        // of a file without a size (those of /proc), so much and no more

int open_regular(struct job *j, const char *path, struct stat *st) {
  // Looked at before it is opened: opening a fifo would wake its writer, opening a device may do anything.
  for (int flags = O_PATH;; flags = O_RDONLY | O_NONBLOCK | O_NOCTTY) {
    int fd = open_beneath(AT_FDCWD, path, flags, 0);
    if (fd < 0) return fail_errno(j, "open", path, NULL);
    int r = fstat(fd, st) ? fail_errno(j, "open", path, NULL) : S_ISREG(st->st_mode) ? 0 : kind_error(j, st->st_mode, path);
    if (!r && flags != O_PATH) return fd;
    close(fd);
    if (r) return -1;
  }
}

// Read into our buffer and send, not sendfile: a frame's length is promised before its bytes, and a file that somebody cuts short
// between the two would leave zeros in the stream. Two copies still give twice what the reader on the other side can take.
int op_read(struct job *j) {
  struct args *a = &j->a;
  struct stat st;
  int fd = open_regular(j, a->path, &st);
  if (fd < 0) return -1;
  posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  struct buf *b = &j->out;
  frame_begin(b, F_STATUS, 0, j->request);
  frame_u64(b, T_SIZE, (uint64_t)st.st_size);
  frame_u64(b, T_MODE, st.st_mode & 07777);
  frame_u64(b, T_MTIME_NS, (uint64_t)((int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec));
  frame_text(b, T_TYPE, type_name(st.st_mode));
  frame_u64(b, T_UID, st.st_uid);
  frame_u64(b, T_GID, st.st_gid);
  if (frame_send(j->conn, b)) { close(fd); j->gone = 1; return fail(j, "internal", errno, "read: the connection is gone"); }

  // The answer ends where the file ended when it was opened: a file that grows as fast as it is read still has an end.
  uint64_t at = a->offset, end = st.st_size ? (uint64_t)st.st_size : at < ENDLESS_MAX ? ENDLESS_MAX : at;
  int endless = !st.st_size, r = 0;
  if (a->has & HAS_LENGTH && a->length < end - (at < end ? at : end)) { end = at + a->length; endless = 0; }
  j->sent = at;
  while (!r && at < end) {
    size_t room;
    uint8_t *to = out_room(j, &room);
    ssize_t n = pread(fd, to, room < end - at ? room : (size_t)(end - at), (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) r = fail_errno(j, "read", a->path, NULL);
    if (n <= 0) break;
    at += (uint64_t)n;
    r = out_add(j, (size_t)n);
  }
  if (!r) r = out_flush(j);
  if (!r && endless && at == end && at) r = fail(j, "file_error", EFBIG, "%.500s has no size and no end within %u bytes", a->path, ENDLESS_MAX);
  close(fd);
  j->size = at > a->offset ? at - a->offset : 0;
  j->reports = REPORT_SIZE;
  return r;
}

// write -----------------------------------------------------------------------------------------------------------------------------

struct target {
  struct place at;
  struct stat old;
  int exists, exclusive;
  int fd;                              // what the bytes go to until the client's OK
  char temp[32];                       // its name, "" when it has none
  int in_place;                        // at the end copy into the old file: it has other names, or an owner that we cannot give
};

// A file without a name where the file system can do it: it is gone when we are, however we end.
static int spool(struct target *t) {
  t->fd = openat(t->at.dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (t->fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return t->fd;
  temp_name(t->temp);
  t->fd = openat(t->at.dir, t->temp, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (t->fd < 0) t->temp[0] = 0;
  return t->fd;
}

static int write_begin(struct job *j, struct target *t) {
  struct args *a = &j->a;
  t->exclusive = !a->overwrite;
  // "create" may not land behind somebody's link, "overwrite" goes where `cat > path` would.
  if (place_find(j, a->path, a->parents != 0, !t->exclusive, &t->at)) { t->at.dir = -1; return -1; }
  t->exists = !fstatat(t->at.dir, t->at.name, &t->old, AT_SYMLINK_NOFOLLOW);
  if (!t->exists && errno != ENOENT) return fail_errno(j, "write", a->path, NULL);
  if (t->exists && t->exclusive) return fail(j, "file_exists", EEXIST, "%.500s exists", a->path);
  if (t->exists && !S_ISREG(t->old.st_mode)) return kind_error(j, t->old.st_mode, a->path);
  // A rename asks only the directory; `cat >` would ask the file.
  if (t->exists && faccessat(t->at.dir, t->at.name, W_OK, AT_EACCESS)) return fail_errno(j, "write", a->path, NULL);
  t->in_place = t->exists && t->old.st_nlink > 1;
  if (spool(t) < 0 && t->exists && (errno == EACCES || errno == EPERM || errno == EROFS)) {
    // The file may be written but its directory may not: gather elsewhere, then copy into it.
    t->in_place = 1;
    t->fd = open_beneath(AT_FDCWD, "/tmp", O_TMPFILE | O_RDWR, 0);
  }
  if (t->fd < 0) return fail_errno(j, "write", a->path, NULL);
  if (t->exists && !t->in_place && fchown(t->fd, t->old.st_uid, t->old.st_gid)) t->in_place = 1;
  return 0;
}

static int write_bytes(struct job *j, int fd) {
  const uint8_t *p;
  size_t n;
  int r;
  while ((r = in_peek(j, &p, &n)) > 0) {
    ssize_t done = write(fd, p, n);
    if (done >= 0) in_eat(j, (size_t)done);
    else if (errno != EINTR) return fail_errno(j, "write", j->a.path, NULL);
  }
  return r;
}

static int set_attributes(struct job *j, struct target *t, int fd) {
  struct args *a = &j->a;
  mode_t mode = a->has & HAS(T_MODE) ? (mode_t)a->mode : t->exists ? t->old.st_mode & 07777 : 0644;
  int own = !t->in_place || a->has & HAS(T_MODE);                // in place the file has its mode already
  if (own && fchmod(fd, mode)) return fail_errno(j, "set the mode of", a->path, NULL);
  if (!(a->has & HAS(T_MTIME_NS))) return 0;
  int64_t ns = (int64_t)a->mtime;
  struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = ns / 1000000000 - (ns % 1000000000 < 0), .tv_nsec = (ns % 1000000000 + 1000000000) % 1000000000}};
  return futimens(fd, times) ? fail_errno(j, "set the time of", a->path, NULL) : 0;
}

static int commit_in_place(struct job *j, struct target *t) {
  struct stat now;
  int fd = openat(t->at.dir, t->at.name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), r = -1;
  if (fd < 0) return fail_errno(j, "write", j->a.path, NULL);
  t->in_place = 1;
  if (fstat(fd, &now) || now.st_dev != t->old.st_dev || now.st_ino != t->old.st_ino)
    fail(j, "file_error", ESTALE, "write %.500s: the file was replaced meanwhile", j->a.path);
  else if (ftruncate(fd, 0) || copy_content(t->fd, fd, j->received)) fail_errno(j, "write", j->a.path, NULL);
  else r = set_attributes(j, t, fd);
  close(fd);
  return r;
}

// Gives the spool a name in the directory: `name` itself (which must be free) or a temporary one. Where a nameless file cannot be linked
// (it needs Linux 6.10, or a capability), its content goes into a named one.
static int give_name(struct target *t, const char *name, uint64_t size) {
  if (t->temp[0]) return renameat2(t->at.dir, t->temp, t->at.dir, name, RENAME_NOREPLACE) ? -1 : (t->temp[0] = 0, 0);
  if (!linkat(t->fd, "", t->at.dir, name, AT_EMPTY_PATH)) return 0;
  if (errno != ENOENT && errno != EPERM && errno != EOPNOTSUPP) return -1;
  struct stat st;
  if (fstat(t->fd, &st)) return -1;
  char temp[32];
  temp_name(temp);
  int fd = openat(t->at.dir, temp, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return -1;
  strcpy(t->temp, temp);
  int spooled = t->fd;
  t->fd = fd;
  int r = copy_content(spooled, fd, size);
  copy_xattrs(spooled, fd);
  struct timespec times[2] = {st.st_atim, st.st_mtim};
  if (!r && t->exists) r = fchown(fd, st.st_uid, st.st_gid);
  if (!r) r = fchmod(fd, st.st_mode & 07777);
  if (!r) r = futimens(fd, times);
  int err = errno;
  close(spooled);
  errno = err;
  return r ? -1 : give_name(t, name, size);
}

static int commit(struct job *j, struct target *t) {
  if (t->in_place) return commit_in_place(j, t);
  if (t->exists) {
    int old = openat(t->at.dir, t->at.name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (old >= 0) { copy_xattrs(old, t->fd); close(old); }
  }
  if (set_attributes(j, t, t->fd)) return -1;
  if (!t->exists) {
    if (!give_name(t, t->at.name, j->received)) return 0;
    if (errno != EEXIST || t->exclusive) return fail_errno(j, "write", j->a.path, NULL);
  }
  if (!t->temp[0]) {
    char temp[32];
    temp_name(temp);
    if (give_name(t, temp, j->received)) return fail_errno(j, "write", j->a.path, NULL);
    strcpy(t->temp, temp);
  }
  if (renameat(t->at.dir, t->temp, t->at.dir, t->at.name)) {
    if (errno == EBUSY && t->exists) return commit_in_place(j, t);   // something is mounted on it
    return fail_errno(j, "write", j->a.path, NULL);
  }
  t->temp[0] = 0;
  return 0;
}

int op_write(struct job *j) {
  struct target t = {.at.dir = -1, .fd = -1};
  int r = write_begin(j, &t);
  if (!r) r = write_bytes(j, t.fd);
  if (!r) r = commit(j, &t);
  if (t.temp[0]) unlinkat(t.at.dir, t.temp, 0);
  if (t.fd >= 0) close(t.fd);
  if (t.at.dir >= 0) close(t.at.dir);
  j->size = j->received;
  j->reports = REPORT_SIZE;
  return r;
}
