// Walking a directory tree of any depth with few descriptors and no recursion. Directories are held open only near the place where the
// walk stands; those further up are found again through ".." and must then be what they were (same device and inode), so that a
// directory that somebody moves away meanwhile ends the walk with ESTALE instead of leading it elsewhere.
#include "files.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define WALK_OPEN 24                   // levels held open
#define WALK_BUF (32u << 10)           // one getdents64 of a level

struct dirent_raw { uint64_t ino; int64_t off; uint16_t size; uint8_t type; char name[]; } __attribute__((packed));

static void shut(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

static int push(struct walk *w, int fd, size_t path) {
  struct stat st;
  if (fstat(fd, &st)) goto bad;
  if (w->depth == w->cap) {
    int cap = w->cap ? w->cap * 2 : 16;
    struct level *more = realloc(w->levels, (size_t)cap * sizeof *more);
    if (!more) goto bad;
    w->levels = more;
    w->cap = cap;
  }
  struct level *l = &w->levels[w->depth];
  *l = (struct level){.fd = fd, .peer = -1, .dev = st.st_dev, .ino = st.st_ino, .path = path, .buf = malloc(WALK_BUF)};
  if (!l->buf) { errno = ENOMEM; goto bad; }
  w->depth++;
  if (w->depth > WALK_OPEN) {
    struct level *far = &w->levels[w->depth - 1 - WALK_OPEN];
    shut(&far->fd);
    shut(&far->peer);
    free(far->buf);
    far->buf = NULL;
    far->pos = far->len = 0;
  }
  return 0;
bad:;
  int err = errno;
  close(fd);
  errno = err;
  return -1;
}

int walk_start(struct walk *w, int fd) {
  int rewind = w->rewind;
  *w = (struct walk){.rewind = rewind, .size = 256, .path = malloc(256)};
  if (!w->path) { close(fd); errno = ENOMEM; return -1; }
  w->path[0] = 0;
  return push(w, fd, 0);
}

void walk_stop(struct walk *w) {
  for (int i = 0; i < w->depth; i++) {
    shut(&w->levels[i].fd);
    shut(&w->levels[i].peer);
    free(w->levels[i].buf);
  }
  free(w->levels);
  free(w->path);
  *w = (struct walk){0};
}

static int up(int fd, dev_t dev, ino_t ino) {
  struct stat st;
  int above = openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (above < 0) return -1;
  if (!fstat(above, &st) && st.st_dev == dev && st.st_ino == ino) return above;
  close(above);
  errno = ESTALE;
  return -1;
}

static int leave(struct walk *w, struct visit *v) {
  struct level *l = &w->levels[w->depth - 1], *above = l - 1;
  if (above->fd < 0) {
    if ((above->fd = up(l->fd, above->dev, above->ino)) < 0) return -1;
    if (l->peer >= 0 && (above->peer = up(l->peer, above->peer_dev, above->peer_ino)) < 0) return -1;
    if (!(above->buf = malloc(WALK_BUF))) { errno = ENOMEM; return -1; }
    if (!w->rewind && above->at && lseek(above->fd, above->at, SEEK_SET) < 0) return -1;
  }
  shut(&l->fd);
  shut(&l->peer);
  free(l->buf);
  w->path[l->path] = 0;
  w->depth--;
  *v = (struct visit){.dir = above->fd, .peer = above->peer, .name = w->path + above->path + (above->path ? 1 : 0), .type = DT_DIR};
  return WALK_LEAVE;
}

static int set_path(struct walk *w, size_t from, const char *name, size_t n) {
  if (from + n + 2 > w->size) {
    size_t size = (from + n + 2) * 2;
    char *more = realloc(w->path, size);
    if (!more) { errno = ENOMEM; return -1; }
    w->path = more;
    w->size = size;
  }
  if (from) w->path[from++] = '/';
  memcpy(w->path + from, name, n + 1);
  return 0;
}

int walk_next(struct walk *w, struct visit *v) {
  struct level *l = &w->levels[w->depth - 1];
  for (;;) {
    if (l->pos >= l->len) {
      long n = l->done ? 0 : syscall(SYS_getdents64, l->fd, l->buf, WALK_BUF);
      if (n < 0 && errno != ENOENT) return -1;                   // ENOENT: the directory was removed while open
      if (n <= 0) return w->depth == 1 ? WALK_END : leave(w, v);
      l->pos = 0;
      l->len = (size_t)n;
    }
    struct dirent_raw *d = (struct dirent_raw *)(l->buf + l->pos);
    l->pos += d->size;
    l->at = d->off;
    if (d->name[0] == '.' && (!d->name[1] || (d->name[1] == '.' && !d->name[2]))) continue;
    if (set_path(w, l->path, d->name, strlen(d->name))) return -1;
    *v = (struct visit){.dir = l->fd, .peer = l->peer, .name = w->path + l->path + (l->path ? 1 : 0), .type = d->type};
    return WALK_ENTRY;
  }
}

int walk_enter(struct walk *w, int *fd) {
  struct level *l = &w->levels[w->depth - 1];
  const char *name = w->path + l->path + (l->path ? 1 : 0);
  int in = openat(l->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (in < 0) return -1;
  if (fd) *fd = in;
  return push(w, in, strlen(w->path));
}

void walk_skip(struct walk *w) { w->levels[w->depth - 1].done = 1; }

void walk_peer(struct walk *w, int fd) {
  struct level *l = &w->levels[w->depth - 1];
  struct stat st = {0};
  fstat(fd, &st);
  l->peer = fd;
  l->peer_dev = st.st_dev;
  l->peer_ino = st.st_ino;
}

static int pseudo_fs(int fd) {
  struct statfs s;
  if (fstatfs(fd, &s)) return 0;
  switch ((unsigned long)s.f_type) {
    case 0x9fa0: case 0x62656572: case 0x1cd1: case 0x27e0eb: case 0x63677270: case 0x64626720: case 0x74726163:  // proc sysfs devpts cgroup cgroup2 debugfs tracefs
    case 0x19800202: case 0x73636673: case 0x6165676c: case 0xcafe4a11: case 0x42494e4d:                          // mqueue securityfs pstore bpf binfmt_misc
      return 1;
    default: return 0;
  }
}

int walk_pseudo(const struct walk *w, const struct visit *v, const struct stat *st) {
  if (st->st_dev == w->levels[w->depth - 1].dev) return 0;
  int fd = openat(v->dir, v->name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  int r = fd >= 0 && pseudo_fs(fd);
  if (fd >= 0) close(fd);
  return r;
}

// sets and bytes --------------------------------------------------------------------------------------------------------------------

static struct id *slot(struct id *slots, size_t cap, uint64_t dev, uint64_t ino) {
  size_t i = (size_t)((ino * 0x9e3779b97f4a7c15ull) ^ (dev * 0xff51afd7ed558ccdull)) & (cap - 1);
  while (slots[i].value && (slots[i].dev != dev || slots[i].ino != ino)) i = (i + 1) & (cap - 1);
  return &slots[i];
}

int idset_put(struct idset *s, uint64_t dev, uint64_t ino, uint64_t value) {
  if (s->used * 2 >= s->cap) {
    size_t cap = s->cap ? s->cap * 2 : 64;
    struct id *more = calloc(cap, sizeof *more);
    if (!more) return -1;
    for (size_t i = 0; i < s->cap; i++)
      if (s->slots[i].value) *slot(more, cap, s->slots[i].dev, s->slots[i].ino) = s->slots[i];
    free(s->slots);
    s->slots = more;
    s->cap = cap;
  }
  struct id *to = slot(s->slots, s->cap, dev, ino);
  if (!to->value) s->used++;
  *to = (struct id){dev, ino, value + 1};                        // 0 marks a free slot
  return 0;
}

int idset_get(const struct idset *s, uint64_t dev, uint64_t ino, uint64_t *value) {
  if (!s->cap) return 0;
  const struct id *at = slot(s->slots, s->cap, dev, ino);
  if (at->value && value) *value = at->value - 1;
  return at->value != 0;
}

void idset_free(struct idset *s) {
  free(s->slots);
  *s = (struct idset){0};
}

int blob_add(struct blob *b, const void *p, size_t n) {
  if (n > b->cap - b->n) {
    size_t cap = (b->n + n) * 2 + 64;
    uint8_t *more = realloc(b->p, cap);
    if (!more) return -1;
    b->p = more;
    b->cap = cap;
  }
  if (n) memcpy(b->p + b->n, p, n);
  b->n += n;
  return 0;
}
