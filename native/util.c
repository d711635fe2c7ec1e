// See util.h.
#include "util.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void fault_text(struct fault *f, const char *code, int err, const char *format, va_list args) {
  if (f->code) return;
  f->code = code;
  f->err = err;
  int n = vsnprintf(f->message, sizeof f->message, format, args);
  if (err && n >= 0 && (size_t)n < sizeof f->message) snprintf(f->message + n, sizeof f->message - (size_t)n, ": %s", strerror(err));
}

int fault_set(struct fault *f, const char *code, int err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fault_text(f, code, err, format, args);
  va_end(args);
  return -1;
}

static const char *scarce(int err) {
  switch (err) {
    case EAGAIN: return "processes";
    case EMFILE: case ENFILE: return "descriptors";
    case ENOMEM: return "memory";
    case ENOSPC: case EDQUOT: return "disk";
    case EUSERS: return "namespaces";
    default: return NULL;
  }
}

int errno_lack(int err) { return err == EMFILE || err == ENFILE || err == ENOMEM; }

static int lack(struct fault *f, const char *resource, int err, const char *format, va_list args) {
  if (!f->code) f->resource = resource;
  fault_text(f, resource ? "resource_exhausted" : "internal", err, format, args);
  return -1;
}

int fault_host(struct fault *f, int err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  lack(f, scarce(err), err, format, args);
  va_end(args);
  return -1;
}

int fault_lack(struct fault *f, const char *resource, int err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  lack(f, err == EAGAIN || err == ENOSPC || err == EMFILE ? resource : scarce(err), err, format, args);
  va_end(args);
  return -1;
}

int write_at(int dir, const char *name, const char *text) {
  int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  size_t n = strlen(text);
  ssize_t r = write(fd, text, n);
  int err = r < 0 ? errno : (size_t)r < n ? EIO : 0;
  close(fd);
  errno = err;
  return err ? -1 : 0;
}

ssize_t read_at(int dir, const char *name, char *to, size_t cap) {
  int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t n = read(fd, to, cap - 1);
  int err = errno;
  close(fd);
  if (n < 0) { errno = err; return -1; }
  to[n] = 0;
  return n;
}

static int number(const char *s, uint64_t *v) {
  char *end;
  errno = 0;
  *v = strtoull(s, &end, 10);
  if (end == s || errno) { errno = EINVAL; return -1; }
  return 0;
}

int read_u64(int dir, const char *name, uint64_t *v) {
  char text[64];
  return read_at(dir, name, text, sizeof text) < 0 ? -1 : number(text, v);
}

int read_key(int dir, const char *name, const char *key, uint64_t *v) {
  char text[4096];
  size_t n = strlen(key);
  if (read_at(dir, name, text, sizeof text) < 0) return -1;
  for (char *line = text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (!strncmp(line, key, n) && line[n] == ' ') return number(line + n + 1, v);
  }
  errno = ENOENT;
  return -1;
}

int path_exists(const char *path) { return !access(path, F_OK); }

int make_dirs(const char *path, mode_t mode) {
  if (!mkdir(path, mode) || errno == EEXIST) return 0;
  char p[4096];
  size_t n = strlen(path);
  if (n >= sizeof p) { errno = ENAMETOOLONG; return -1; }
  memcpy(p, path, n + 1);
  for (char *slash = p + 1; *slash && (slash = strchr(slash, '/')); slash++) {
    *slash = 0;
    if (mkdir(p, 0755) && errno != EEXIST) return -1;
    *slash = '/';
  }
  return mkdir(p, mode) && errno != EEXIST ? -1 : 0;
}

int open_inside(int root, const char *path, int flags) {
  struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
  return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

// Depth is bounded by what an agent can nest, so this keeps no stack of its own: it goes down into the first directory it meets and
// starts over from the top when that is empty... which is quadratic in depth; hence one descriptor a level, in a list on the heap.
struct level { struct level *up; DIR *dir; char name[256]; };

static struct level *enter_level(struct level *up, int dir, const char *name) {
  int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct level *l = fd < 0 ? NULL : malloc(sizeof *l);
  if (!l || !(l->dir = fdopendir(fd))) {
    if (fd >= 0) close(fd);
    free(l);
    return NULL;
  }
  l->up = up;
  snprintf(l->name, sizeof l->name, "%s", name);
  return l;
}

int remove_all(int dir, const char *name) {
  if (!unlinkat(dir, name, 0)) return 0;
  if (errno == ENOENT) return 0;
  if (errno != EISDIR && errno != EPERM) return -1;
  struct level *top = enter_level(NULL, dir, name);
  int bad = top ? 0 : errno;
  while (top) {
    struct dirent *e = bad ? NULL : readdir(top->dir);
    if (!e) {
      struct level *up = top->up;
      closedir(top->dir);
      if (!bad && unlinkat(up ? dirfd(up->dir) : dir, top->name, AT_REMOVEDIR) && errno != ENOENT) bad = errno;
      free(top);
      top = up;
      continue;
    }
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !unlinkat(dirfd(top->dir), e->d_name, 0)) continue;
    struct level *down = enter_level(top, dirfd(top->dir), e->d_name);
    if (down) top = down;
    else bad = errno;
  }
  errno = bad;
  return bad ? -1 : 0;
}

void close_fd(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

void nap_us(unsigned us) {
  struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};
  nanosleep(&t, NULL);
}

pid_t sys_clone3(struct clone_args *a) { return (pid_t)syscall(SYS_clone3, a, sizeof *a); }
int sys_pidfd_open(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }
int sys_pidfd_kill(int pidfd, int sig) { return (int)syscall(SYS_pidfd_send_signal, pidfd, sig, NULL, 0); }
int sys_pivot_root(const char *new_root, const char *put_old) { return (int)syscall(SYS_pivot_root, new_root, put_old); }
