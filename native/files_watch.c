// Watching a directory: one RECORD for each thing that happens in it, and with T_RECURSIVE in the directories below, those that come later
// too. Each directory is entered before it is watched, so that nobody can lead a watch elsewhere. Ends when the directory goes.
#include "files.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define WATCHES_MAX 8192               // directories of one watch
#define EVENTS (IN_CREATE | IN_DELETE | IN_MODIFY | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_ONLYDIR | IN_DONT_FOLLOW)
#define OF_THE_ROOT (IN_DELETE_SELF | IN_MOVE_SELF)

struct watched { int wd; char *path; };                          // path: below the root; "" is the root
struct watcher { struct job *job; int events; struct watched *all; size_t n, cap; };

static int tell(struct watcher *w, const char *what, const char *path, int directory) {
  struct buf *b = &w->job->out;
  frame_begin(b, F_RECORD, 0, w->job->request);
  frame_text(b, T_EVENT, what);
  frame_text(b, T_NAME, path);
  if (directory) frame_text(b, T_TYPE, "directory");
  if (!frame_send(w->job->conn, b)) return 0;
  w->job->gone = 1;
  return fail(w->job, "internal", errno, "watch: the connection is gone");
}

// The kernel numbers watches upward, so they stay sorted as they come.
static size_t place_of(const struct watcher *w, int wd) {
  size_t low = 0, high = w->n;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (w->all[middle].wd < wd) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct watched *find(const struct watcher *w, int wd) {
  size_t at = place_of(w, wd);
  return at < w->n && w->all[at].wd == wd ? &w->all[at] : NULL;
}

static void drop(struct watcher *w, size_t at) {
  free(w->all[at].path);
  memmove(&w->all[at], &w->all[at + 1], (--w->n - at) * sizeof *w->all);
}

// Nothing is held open: the end of a directory is told when nobody uses it any more.
static int watch_here(int events, int fd, uint32_t more) {
  if (fchdir(fd)) return -1;
  int wd = inotify_add_watch(events, ".", EVENTS | more), err = errno;
  if (chdir("/")) return -1;
  errno = err;
  return wd;
}

// The directory fd. 0, or -1 with errno
static int add(struct watcher *w, int fd, const char *path) {
  int wd = watch_here(w->events, fd, *path ? 0 : OF_THE_ROOT);
  if (wd < 0) return -1;
  char *copy = strdup(path);
  if (!copy) return -1;
  struct watched *known = find(w, wd);                           // the same directory by another path: a mount
  if (known) { free(known->path); known->path = copy; return 0; }
  if (w->n == WATCHES_MAX) { free(copy); inotify_rm_watch(w->events, wd); errno = ENOSPC; return -1; }
  if (w->n == w->cap) {
    size_t wider = w->cap ? w->cap * 2 : 16;
    struct watched *more = realloc(w->all, wider * sizeof *more);
    if (!more) { free(copy); return -1; }
    w->all = more;
    w->cap = wider;
  }
  size_t at = place_of(w, wd);
  memmove(&w->all[at + 1], &w->all[at], (w->n++ - at) * sizeof *w->all);
  w->all[at] = (struct watched){wd, copy};
  return 0;
}

static int cannot(struct watcher *w, const char *path) {
  int err = errno;
  if (err == ENOSPC || err == EMFILE) return fail(w->job, "resource_exhausted", err, "watch %.500s: %s", w->job->a.path, err == EMFILE ?
    "no more watches on this machine (fs.inotify.max_user_instances)" : "more directories than can be watched (8192, or fs.inotify.max_user_watches)");
  return fail_errno(w->job, "watch", w->job->a.path, path);
}

// The directory fd and those below it. Their entries are told of when they came with a directory that is new.
static int add_tree(struct watcher *w, int fd, const char *path, int told) {
  struct walk walk = {0};
  struct visit v;
  struct stat st;
  char below[PATH_MAX];
  int r = -1;
  if (add(w, fd, path)) { cannot(w, path); close(fd); return -1; }
  if (walk_start(&walk, fd)) return cannot(w, path);
  while ((r = walk_next(&walk, &v)) != WALK_END) {
    if (r < 0) {
      if (errno == ESTALE || errno == ENOENT) { r = 0; break; }  // moved meanwhile: the watches say so
      cannot(w, path);
      break;
    }
    if (r == WALK_LEAVE || fstatat(v.dir, v.name, &st, AT_SYMLINK_NOFOLLOW)) continue;
    if ((size_t)snprintf(below, sizeof below, "%s%s%s", path, *path ? "/" : "", walk.path) >= sizeof below) continue;
    if (told && (r = tell(w, "create", below, S_ISDIR(st.st_mode)))) break;
    int inner;
    if (!S_ISDIR(st.st_mode) || walk_pseudo(&walk, &v, &st) || walk_enter(&walk, &inner)) continue;
    if (add(w, inner, below)) {
      if (errno == EACCES || errno == ENOENT) { walk_skip(&walk); continue; }
      r = cannot(w, below);
      break;
    }
  }
  walk_stop(&walk);
  return r < 0 ? -1 : 0;
}

static int add_new(struct watcher *w, const char *path) {
  char whole[PATH_MAX];
  if ((size_t)snprintf(whole, sizeof whole, "%s/%s", w->job->a.path, path) >= sizeof whole) return 0;
  int fd = open_beneath(AT_FDCWD, whole, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK, 0);
  return fd < 0 ? 0 : add_tree(w, fd, path, 1);                  // gone again, or not ours to read
}

// What was moved away is no longer below.
static void forget(struct watcher *w, const char *path) {
  size_t n = strlen(path);
  for (size_t i = w->n; i-- > 0;)
    if (!strncmp(w->all[i].path, path, n) && (w->all[i].path[n] == '/' || !w->all[i].path[n])) {
      inotify_rm_watch(w->events, w->all[i].wd);
      drop(w, i);
    }
}

// 1: the root is gone, 0: go on, -1
static int happened(struct watcher *w, const struct inotify_event *e) {
  static const struct { uint32_t mask; const char *name; } NAMES[] = {
    {IN_CREATE | IN_MOVED_TO, "create"}, {IN_DELETE, "remove"}, {IN_MOVED_FROM, "rename"}, {IN_MODIFY, "write"}, {IN_ATTRIB, "chmod"}};
  if (e->mask & IN_Q_OVERFLOW) return tell(w, "overflow", "", 0);
  struct watched *at = find(w, e->wd);
  if (!at) return 0;                   // of a directory that was moved away
  if (e->mask & (OF_THE_ROOT | IN_UNMOUNT) && !*at->path) return tell(w, e->mask & IN_MOVE_SELF ? "rename" : "remove", "", 1) ? -1 : 1;
  if (e->mask & IN_IGNORED) { drop(w, place_of(w, e->wd)); return 0; }
  if (!e->len) return 0;               // of the directory itself: its parent's event names it
  char path[PATH_MAX];
  if ((size_t)snprintf(path, sizeof path, "%s%s%s", at->path, *at->path ? "/" : "", e->name) >= sizeof path) return 0;
  int directory = (e->mask & IN_ISDIR) != 0;
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
    if (e->mask & NAMES[i].mask && tell(w, NAMES[i].name, path, directory)) return -1;
  if (!directory || !w->job->a.recursive) return 0;
  if (e->mask & IN_MOVED_FROM) forget(w, path);
  return e->mask & (IN_CREATE | IN_MOVED_TO) ? add_new(w, path) : 0;
}

// Until the root goes or nobody listens.
static int follow(struct watcher *w) {
  static char space[64 << 10] __attribute__((aligned(8)));
  for (;;) {
    struct pollfd p[2] = {{.fd = w->events, .events = POLLIN}, {.fd = w->job->conn, .events = POLLIN | POLLRDHUP}};
    if (poll(p, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return cannot(w, NULL);
    }
    if (p[1].revents) { w->job->gone = 1; return fail(w->job, "internal", 0, "watch: the connection is gone"); }
    ssize_t n = read(w->events, space, sizeof space);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return cannot(w, NULL);
    for (char *at = space; at < space + n;) {
      const struct inotify_event *e = (const void *)at;
      int r = happened(w, e);
      if (r) return r < 0 ? -1 : 0;
      at += sizeof *e + e->len;
    }
  }
}

int op_watch(struct job *j) {
  struct watcher w = {.job = j, .events = inotify_init1(IN_CLOEXEC | IN_NONBLOCK)};
  if (w.events < 0) return cannot(&w, NULL);
  int fd = open_beneath(AT_FDCWD, j->a.path, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0), r;
  if (fd < 0) return fail_errno(j, "watch", j->a.path, NULL);
  if (j->a.recursive) r = add_tree(&w, fd, "", 0);
  else {
    r = add(&w, fd, "") ? cannot(&w, NULL) : 0;
    close(fd);
  }
  if (r) return -1;                    // the process ends, and with it all that is open
  struct buf *b = &j->out;
  frame_begin(b, F_STATUS, 0, j->request);                       // from here on nothing is missed
  if (frame_send(j->conn, b)) { j->gone = 1; return fail(j, "internal", errno, "watch: the connection is gone"); }
  return follow(&w);
}
