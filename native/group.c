// The v2 groups below the sandbox's own: one for each command ("c.<id>") and each session ("s.<name>"). They hold no limits; they are
// how aether knows and reaches every process of a command, however it forks.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "machine.h"
#include "util.h"

#define DEPTH 8                        // of groups below one of ours; inside nobody can make any, a privileged guest might

struct old { struct old *next; char name[ID_SIZE + 4]; };  // ended, with a process still inside
static struct old *olds, *fresh;         // fresh: not tried yet

int group_make(const char *name, struct fault *f) {
  if (A.s->channel > 0) return fcntl(A.s->cgroup_fd, F_DUPFD_CLOEXEC, 3); // the hand makes it when the command starts
  int made = !mkdirat(A.s->cgroup_fd, name, 0755);
  int fd = made || errno == EEXIST ? openat(A.s->cgroup_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd >= 0) return fd;
  *f = (struct fault){0};
  if (errno == ENOMEM) fault_set(f, "no_memory", errno, "make cgroup %s", name);
  else fault_lack(f, "cgroups", errno, "make cgroup %s", name);
  if (made) unlinkat(A.s->cgroup_fd, name, AT_REMOVEDIR);
  return -1;
}

void group_kill(const char *name) {
  char path[ID_SIZE + 32];
  if (A.s->channel > 0 && *name) { machine_group(name, 0); return; }
  snprintf(path, sizeof path, *name ? "%s/cgroup.kill" : "%scgroup.kill", name);
  int fd = openat(A.s->cgroup_fd, path, O_WRONLY | O_CLOEXEC);
  int killed = fd >= 0 && write(fd, "1", 1) == 1;
  if (fd >= 0) close(fd);
  for (int i = 0; !killed && i < 3; i++) group_signal(name, SIGKILL, NULL, 0);  // a kernel before 5.14: as often as it may fork
}

// Calls fn for each pid in the group at `dir` and below it.
static void walk(int dir, int depth, void (*fn)(int32_t pid, void *arg), void *arg) {
  int fd = openat(dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
  char text[8192];
  size_t have = 0;
  for (ssize_t n; fd >= 0 && (n = read(fd, text + have, sizeof text - 1 - have)) > 0;) {
    have += (size_t)n;
    text[have] = 0;
    char *p = text;
    for (char *line; (line = strchr(p, '\n')); p = line + 1) fn((int32_t)strtol(p, NULL, 10), arg);
    have -= (size_t)(p - text);
    memmove(text, p, have);
  }
  if (fd >= 0) close(fd);
  struct stat st;
  if (depth == 0 || fstat(dir, &st) || st.st_nlink <= 2) return; // no group below
  int again = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = again < 0 ? NULL : fdopendir(again);
  if (!d) { if (again >= 0) close(again); return; }
  for (struct dirent *e; (e = readdir(d));) {
    if (e->d_type != DT_DIR || e->d_name[0] == '.') continue;
    int below = openat(dir, e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (below < 0) continue;
    walk(below, depth - 1, fn, arg);
    close(below);
  }
  closedir(d);
}

void group_each(const char *name, void (*fn)(int32_t, void *), void *arg) {
  int dir = openat(A.s->cgroup_fd, *name ? name : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return;
  walk(dir, DEPTH, fn, arg);
  close(dir);
}

static int by_pid(const void *a, const void *b) {
  int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

struct hit { int signal; const int32_t *except; size_t n; };

static void hit_one(int32_t pid, void *arg) {
  struct hit *h = arg;
  if (pid > 0 && !(h->n && bsearch(&pid, h->except, h->n, sizeof pid, by_pid))) kill(pid, h->signal);
}

void group_signal(const char *name, int signal, const int32_t *except, size_t n) {
  struct hit h = {signal, except, n};
  if (A.s->channel > 0 && *name) { machine_group(name, signal); return; }
  group_each(name, hit_one, &h);
}

struct list { int32_t *pids; size_t n, cap; };

static void list_one(int32_t pid, void *arg) {
  struct list *l = arg;
  if (l->n < l->cap) l->pids[l->n++] = pid;
}

size_t group_pids(const char *name, int32_t *pids, size_t cap) {
  struct list l = {pids, 0, cap};
  group_each(name, list_one, &l);
  qsort(pids, l.n, sizeof *pids, by_pid);
  return l.n;
}

static int is_inside(pid_t pid) {
  char path[48], text[4096], mine[ID_SIZE + 4];
  snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  snprintf(mine, sizeof mine, "/%.31s", A.s->spec.id);
  for (char *p = strstr(text, mine); p; p = strstr(p + 1, mine))
    if (p[strlen(mine)] == '\n' || p[strlen(mine)] == '/') return 1;
  return 0;
}

void tracers_kill(pid_t pid) {
  for (int i = 0; i < 16 && pid > 0; i++) {
    char path[48], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return;
    text[n] = 0;
    char *line = strstr(text, "\nTracerPid:\t");
    pid = line ? (pid_t)atoi(line + 12) : 0;
    if (pid > 0 && is_inside(pid)) kill(pid, SIGKILL);
  }
}

void group_drop(const char *name) {
  if (A.s->channel > 0) { machine_drop(name); return; }
  struct old *o = malloc(sizeof *o);
  if (!o) { unlinkat(A.s->cgroup_fd, name, AT_REMOVEDIR); return; } // if that fails it stays until the sandbox is removed, with all below it
  snprintf(o->name, sizeof o->name, "%s", name);
  o->next = fresh;
  fresh = o;
}

void groups_dropped(void) {
  while (fresh) {
    struct old *o = fresh;
    fresh = o->next;
    if (!unlinkat(A.s->cgroup_fd, o->name, AT_REMOVEDIR) || errno == ENOENT) { free(o); continue; }
    o->next = olds;
    olds = o;
    timer_want(A.now + 1000 * MS);
  }
}

int groups_sweep(void) {
  int left = 0;
  for (struct old **p = &olds; *p;) {
    struct old *o = *p;
    if (unlinkat(A.s->cgroup_fd, o->name, AT_REMOVEDIR) && errno != ENOENT) { left++; p = &o->next; continue; }
    *p = o->next;
    free(o);
  }
  return left;
}

void groups_end(void) {                // every process is dead: what is left empties within moments
  groups_dropped();
  for (int i = 0; i < 100 && groups_sweep(); i++) usleep(2000);
}
