// Paths. The helper's root is the sandbox's root and its rights are the sandbox's, so a link or a race inside can only lead to where the
// agent could have gone itself; what is never followed is a magic link of /proc, and what is never opened blocking is a fifo.
#include "files.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINKS 40                       // as the kernel's own bound

int open_beneath(int dir, const char *path, int flags, uint64_t resolve) {
  struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = resolve | RESOLVE_NO_MAGICLINKS};
  for (int i = 0;; i++) {
    int fd = (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
    if (fd >= 0 || (errno != EINTR && !(errno == EAGAIN && resolve && i < 100))) return fd;   // EAGAIN: raced with a rename
  }
}

void temp_name(char name[32]) {
  uint64_t r = 0;
  if (getrandom(&r, sizeof r, GRND_NONBLOCK) != sizeof r) r = (uint64_t)getpid();
  snprintf(name, 32, ".dsec-%016llx", (unsigned long long)r);
}

const char *type_name(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG: return "file";
    case S_IFDIR: return "directory";
    case S_IFLNK: return "symlink";
    case S_IFIFO: return "fifo";
    case S_IFSOCK: return "socket";
    case S_IFCHR: return "char";
    case S_IFBLK: return "block";
    default: return "unknown";
  }
}

int kind_error(struct job *j, mode_t mode, const char *path) {
  if (S_ISDIR(mode)) return fail(j, "is_a_directory", EISDIR, "%.500s is a directory", path);
  return fail(j, "file_error", EINVAL, "%.500s is a %s, not a regular file", path, type_name(mode));
}

// mkdir -p without a string of its own: each component is entered before the next is made. made: the last one is new.
static int make_parts(const char *path, int *made) {
  int dir = open_beneath(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0);
  *made = 0;
  for (const char *p = path; dir >= 0; ) {
    p += strspn(p, "/");
    size_t n = strcspn(p, "/");
    if (!n) break;
    char name[NAME_MAX + 1];
    int fd = -1;
    if (n > NAME_MAX) errno = ENAMETOOLONG;
    else {
      memcpy(name, p, n);
      name[n] = 0;
      fd = open_beneath(dir, name, O_PATH | O_DIRECTORY, 0);
      *made = 0;
      if (fd < 0 && errno == ENOENT) {
        if (!mkdirat(dir, name, 0755)) *made = 1;
        if (*made || errno == EEXIST) fd = open_beneath(dir, name, O_PATH | O_DIRECTORY, 0);
      }
    }
    int err = errno;
    close(dir);
    errno = err;
    dir = fd;
    p += n;
  }
  return dir;
}

int make_dir(struct job *j, const char *path, int parents, int *made) {
  int none;
  if (!made) made = &none;
  *made = 0;
  int fd = open_beneath(AT_FDCWD, path, O_PATH | O_DIRECTORY, 0);
  if (fd < 0 && errno == ENOENT && parents) fd = make_parts(path, made);
  if (fd < 0) return fail_errno(j, parents ? "make directory" : "open directory", path, NULL);
  return fd;
}

// Splits `path` into an open directory and a last name. The name is never empty, "." or "..".
static int split(struct job *j, int base, const char *path, const char *shown, int parents, struct place *p) {
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') n--;
  size_t cut = n;
  while (cut && path[cut - 1] != '/') cut--;
  size_t len = n - cut;
  const char *name = path + cut;
  if (!len || (path[0] == '/' && n == 1) || (len == 1 && name[0] == '.') || (len == 2 && !memcmp(name, "..", 2)))
    return fail(j, "invalid_request", EINVAL, "%.500s does not name an entry of a directory", shown);
  if (len > NAME_MAX || cut >= PATH_MAX) { errno = ENAMETOOLONG; return fail_errno(j, "open", shown, NULL); }
  char dir[PATH_MAX];
  memcpy(dir, path, cut);
  dir[cut] = 0;
  memcpy(p->name, name, len);
  p->name[len] = 0;
  if (parents && dir[0] == '/') p->dir = make_dir(j, dir, 1, NULL);
  else if ((p->dir = open_beneath(base, cut ? dir : ".", O_PATH | O_DIRECTORY, 0)) < 0) fail_errno(j, "open the directory of", shown, NULL);
  return p->dir < 0 ? -1 : 0;
}

int place_find(struct job *j, const char *path, int parents, int follow, struct place *p) {
  if (split(j, AT_FDCWD, path, path, parents, p)) return -1;
  char target[PATH_MAX];
  for (int i = 0; follow; i++) {
    ssize_t n = readlinkat(p->dir, p->name, target, sizeof target - 1);
    if (n < 0) return 0;               // not a link, or nothing there yet
    if (i == LINKS) { close(p->dir); errno = ELOOP; return fail_errno(j, "open", path, NULL); }
    target[n] = 0;
    int from = p->dir;
    int r = split(j, from, target, path, 0, p);
    close(from);
    if (r) return -1;
  }
  return 0;
}
