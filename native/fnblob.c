// Bytes that calls share (a compiled program, a checker, test data), kept in memory under a name of the edge's; and the files of a call.
#include "fncall.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "util.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif
#define BLOBS 4096
#define NAME_MAX_INSIDE 1024

static struct blob { char *id; int fd; } *blobs;
static size_t used, cap;

static struct blob *find(const char *id) {
  for (size_t i = 0; i < used; i++)
    if (!strcmp(blobs[i].id, id)) return &blobs[i];
  return NULL;
}

static struct blob *add(const char *id, struct fault *f) {
  if (used == cap) {
    size_t wider = cap ? 2 * cap : 16;
    struct blob *p = used < BLOBS ? realloc(blobs, wider * sizeof *p) : NULL;
    if (!p) { fault_set(f, "resource_exhausted", 0, "the worker holds %zu shared files", used); return NULL; }
    blobs = p;
    cap = wider;
  }
  char *copy = strdup(id);
  if (!copy) { fault_host(f, ENOMEM, "keep a shared file"); return NULL; }
  blobs[used] = (struct blob){copy, -1};
  return &blobs[used++];
}

int fd_write(int fd, const uint8_t *p, size_t n) {
  while (n) {
    ssize_t done = write(fd, p, n);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return -1;
    p += done;
    n -= (size_t)done;
  }
  return 0;
}

int fd_copy(int from, int to, uint64_t most) {
  for (off_t at = 0; most;) {
    ssize_t n = sendfile(to, from, &at, most < (1u << 30) ? (size_t)most : 1u << 30);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (!n) return 0;
    most -= (uint64_t)n;
  }
  return 0;
}

int shared_add(const char *id, const uint8_t *p, size_t n, struct fault *f) {
  struct blob *b = find(id);
  if (!b && !(b = add(id, f))) return -1;
  if (b->fd < 0 && (b->fd = input_make()) < 0) return fault_host(f, errno, "make a shared file");
  return fd_write(b->fd, p, n) ? fault_host(f, errno, "write a shared file") : 0;
}

int shared_take(const char *id, int fd, struct fault *f) {
  shared_drop(id);
  struct blob *b = add(id, f);
  if (!b) return -1;
  b->fd = fd;
  return 0;
}

int shared_find(const char *id) {
  struct blob *b = find(id);
  return b ? b->fd : -1;
}

void shared_drop(const char *id) {
  struct blob *b = find(id);
  if (!b) return;
  close_fd(&b->fd);
  free(b->id);
  *b = blobs[--used];
}

int input_make(void) { return memfd_create("input", MFD_CLOEXEC | MFD_NOEXEC_SEAL); }

// The same file through another description: whoever gets it has no way to write to it, nor to move the offset of ours.
int input_reopen(int fd) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return open(path, O_RDONLY | O_CLOEXEC);
}

// u32 mode, u8 kind (0: bytes, 1: shared), name, NUL, then the bytes or the id, NUL.
int file_parse(const struct item *i, struct fn_file *file) {
  if (i->size < 6) return -1;
  const uint8_t *p = i->p + 5, *end = i->p + i->size, *nul = memchr(p, 0, (size_t)(end - p));
  if (!nul) return -1;
  *file = (struct fn_file){.name = (const char *)p, .p = nul + 1, .n = (size_t)(end - nul - 1)};
  memcpy(&file->mode, i->p, sizeof file->mode);
  if (i->p[4] == 0) return 0;
  if (i->p[4] != 1 || !file->n || memchr(file->p, 0, file->n) != end - 1) return -1;
  file->blob = (const char *)file->p;
  return 0;
}

static int beneath(int dir, const char *path, int flags, mode_t mode) {
  struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .mode = mode, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
  return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

// The directories above it are made, and belong to the call like the file itself. Nothing runs in the box yet.
static int parents(int work, char *path, uint32_t owner) {
  for (char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    int made = !mkdirat(work, path, 0755);
    int bad = (!made && errno != EEXIST) || (made && fchownat(work, path, owner, owner, AT_SYMLINK_NOFOLLOW));
    *slash = '/';
    if (bad) return -1;
  }
  return 0;
}

static int sane(const char *name) {
  size_t n = strlen(name);
  return n && n < NAME_MAX_INSIDE && *name != '/' && name[n - 1] != '/' && strcmp(name, "..") && strncmp(name, "../", 3) && !strstr(name, "/../") &&
         (n < 3 || strcmp(name + n - 3, "/.."));
}

int file_put(int work, const struct fn_file *file, uint32_t owner, struct fault *f) {
  char path[NAME_MAX_INSIDE];
  if (!sane(file->name)) return fault_set(f, "invalid_request", 0, "the file name %.100s is empty, absolute or leads out of /box", file->name);
  snprintf(path, sizeof path, "%s", file->name);
  int shared = file->blob ? shared_find(file->blob) : -1;
  if (file->blob && shared < 0) return fault_set(f, "not_found", 0, "there is no shared file %.60s", file->blob);
  int fd = parents(work, path, owner) ? -1 : beneath(work, path, O_WRONLY | O_CREAT | O_EXCL, 0600);
  int bad = fd < 0 || (shared >= 0 ? fd_copy(shared, fd, UINT64_MAX) : fd_write(fd, file->p, file->n)) || fchmod(fd, file->mode & 0777) || fchown(fd, owner, owner);
  int err = errno;
  close_fd(&fd);
  if (!bad) return 0;
  if (err == ENOSPC) return fault_set(f, "no_space", err, "the files of the call are larger than its disk limit");
  if (err == EEXIST || err == ENOTDIR || err == EISDIR) return fault_set(f, "invalid_request", err, "the file %.100s is there twice", file->name);
  return fault_host(f, err, "write %.100s", file->name);
}

// The directory is the call's work: nothing in it is followed, and what is not a plain file is not opened for long.
int file_get(int work, const char *name, uint64_t most, struct fault *f) {
  struct stat st;
  int fd = sane(name) ? beneath(work, name, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0) : -1;
  if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) fault_set(f, "file_not_found", fd < 0 ? errno : 0, "the call left no file %.100s", name);
  else if ((uint64_t)st.st_size > most) fault_set(f, "too_large", 0, "%.100s has %lld bytes, at most %llu are taken", name, (long long)st.st_size, (unsigned long long)most);
  else return fd;
  close_fd(&fd);
  return -1;
}
