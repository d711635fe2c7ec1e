// Memory of the sandbox that goes back to the host, where it has been idle or is paused, and comes back when it runs on. A child does it, so
// that the loop goes on: it may take long and may be stopped at any time. Whose processes these are decides what their maps look like, so the work is bounded: one pass
// over them, a fixed buffer, and an alarm.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define LONGEST_S 60                   // for one pass
#define BATCH 512                      // ranges of one call
#define WORTH (2u << 20)               // an idle one that holds less keeps it
#define BRING_S 10                     // so long pages are brought back
#define BRING_MOST (128u << 20)        // more than this comes back as it is touched
#define MOST (1ul << 30)               // bytes of one call: the kernel cuts longer ones short

enum job { NOTHING, TAKE, BRING };
static struct source child = {.fd = -1};
static pid_t child_pid;
static enum job job, next_job;         // what the child does; what the one after it shall do
static int stopped;                    // it was killed and is not reaped yet
static uint64_t used_before;
static const char *why;
static struct asker *askers;           // RECLAIM: they wait for what comes of it

// the child --------------------------------------------------------------------------------------------------------------------------

struct push { int pidfd, gone; size_t n, bytes; struct iovec iov[BATCH]; };

// A range of a kind that cannot go (locked, a device's), or that is not there any more, costs one call; what comes behind it goes on.
static void flush(struct push *p) {
  for (size_t i = 0; i < p->n && !p->gone; i++) {
    ssize_t done = syscall(SYS_process_madvise, p->pidfd, p->iov + i, p->n - i, job == TAKE ? MADV_PAGEOUT : MADV_WILLNEED, 0);
    if (done < 0 && (errno == ESRCH || errno == EPERM || errno == ENOSYS)) p->gone = 1;
    for (; done > 0 && i < p->n && (size_t)done >= p->iov[i].iov_len; i++) done -= (ssize_t)p->iov[i].iov_len;
  }
  p->n = p->bytes = 0;
}

static void push(struct push *p, uint64_t from, uint64_t to) {
  while (from < to && !p->gone) {
    size_t n = to - from < MOST - p->bytes ? (size_t)(to - from) : MOST - p->bytes;
    p->iov[p->n++] = (struct iovec){(void *)(uintptr_t)from, n};
    p->bytes += n;
    from += n;
    if (p->n == BATCH || p->bytes == MOST) flush(p);
  }
}

// One line of maps: `from-to rwxp offset dev inode  path`. What nobody can write to there and has a file is the file's, and others' too.
static void line(struct push *p, const char *text) {
  char *end;
  uint64_t from = strtoull(text, &end, 16), to = *end == '-' ? strtoull(end + 1, &end, 16) : 0, inode = 0;
  if (from >= to || to >> 63 || *end != ' ' || strlen(end) < 6) return; // the last half of all addresses is the kernel's: vsyscall
  const char *access = end + 1;
  if (sscanf(access + 4, " %*s %*s %llu", (unsigned long long *)&inode) == 1 && inode && access[1] != 'w') return;
  push(p, from, to);
}

// Lines as they come, cut to what matters of them: a path may be long.
static void maps(struct push *p, int fd) {
  static char text[65536], head[128];
  size_t used = 0;
  for (ssize_t n; !p->gone && (n = read(fd, text, sizeof text)) > 0;)
    for (const char *at = text, *end = text + n; at < end;) {
      const char *stop = memchr(at, '\n', (size_t)(end - at));
      size_t part = (size_t)((stop ? stop : end) - at), room = sizeof head - 1 - used;
      memcpy(head + used, at, part < room ? part : room);
      used += part < room ? part : room;
      at += part;
      if (!stop) break;
      head[used] = 0;
      line(p, head);
      used = 0;
      at++;
    }
  flush(p);
}

// The number was our process's when the group was read. What is opened through /proc after the pidfd, while the pidfd's process lives, is of
// the same process; its group says whether that is still one of ours.
static void one(int32_t pid, void *arg) {
  static struct push p;
  char path[32], text[4096];
  p = (struct push){.pidfd = sys_pidfd_open(pid)};
  snprintf(path, sizeof path, "/proc/%d", pid);
  int dir = p.pidfd < 0 ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int fd = dir < 0 || read_at(dir, "cgroup", text, sizeof text) < 0 || !strstr(text, arg) || sys_pidfd_kill(p.pidfd, 0) ? -1 : openat(dir, "maps", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) maps(&p, fd);
  close_fd(&fd);
  close_fd(&dir);
  close_fd(&p.pidfd);
}

static void __attribute__((noreturn)) work(void) {
  char id[80];
  int *memory = &A.s->box->v1[CG_MEMORY];
  // nothing that others wait to be closed stays open in here
  if (dup2(A.s->cgroup_fd, 3) < 0 || (*memory >= 0 && dup2(*memory, 4) < 0)) _exit(1);
  A.s->cgroup_fd = 3;
  if (*memory >= 0) *memory = 4;
  syscall(SYS_close_range, 5, ~0u, 0);
  signal(SIGALRM, SIG_DFL);
  snprintf(id, sizeof id, "/%s", A.s->spec.id);
  if (job == BRING) {
    alarm(BRING_S);
    group_each("", one, id);
    _exit(0);
  }
  (void)!nice(10);
  // two at a time on a node: hundreds at once would all be writing for long before the first of them gives anything back
  int turn = open(getpid() & 1 ? node.run : node.state, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (turn >= 0) flock(turn, LOCK_EX);
  alarm(LONGEST_S);
  cgroup_swap(A.s, 1);
  // frames that one process maps, in its own order, so that they lie together on the device and come back together
  group_each("", one, id);
  cgroup_reclaim(A.s);
  cgroup_swap(A.s, 0);
  _exit(0);
}

// the parent -------------------------------------------------------------------------------------------------------------------------

static struct usage usage(void) {
  struct usage u = {0};
  cgroup_usage(A.s, &u);
  return u;
}

static int begin(enum job what);

static void tell(uint64_t bytes) {
  for (struct asker a; asker_next(&askers, &a);) {
    if (!a.conn) continue;
    struct buf b = reply_buf();
    frame_begin(&b, F_STATUS, 0, a.request);
    frame_u64(&b, T_BYTES, bytes);
    conn_reply(a.conn, &b);
  }
}

static void on_child(struct source *src, uint32_t events) {
  (void)events;
  while (waitpid(child_pid, NULL, 0) < 0 && errno == EINTR) {}
  child_pid = 0;
  loop_close(src);
  uint64_t now = usage().memory, gave = job == TAKE && now < used_before ? used_before - now : 0;
  if (gave || (job == TAKE && !stopped)) event_bytes("reclaimed", why, gave);
  if (job == TAKE && stopped) cgroup_swap(A.s, 0);
  enum job more = next_job;
  stopped = 0;
  job = next_job = NOTHING;
  if (more != TAKE || begin(TAKE)) tell(gave);
  if (more == BRING) begin(BRING);
}

static void cut_short(void) {
  if (!stopped) kill(child_pid, SIGKILL); // not waited for: it may be in a write to the device
  stopped = 1;
}

static int begin(enum job what) {
  if (child_pid) {
    if (stopped || job != what) { next_job = what; cut_short(); }
    return 0;
  }
  job = what;
  used_before = usage().memory;
  child_pid = fork();
  if (!child_pid) work();
  int fd = child_pid < 0 ? -1 : sys_pidfd_open(child_pid);
  if (fd < 0) {
    if (child_pid > 0) {
      kill(child_pid, SIGKILL);
      while (waitpid(child_pid, NULL, 0) < 0 && errno == EINTR) {}
    }
    child_pid = 0;
    job = NOTHING;
    return -1;
  }
  child = (struct source){.on = on_child, .fd = fd};
  loop_want(&child, EPOLLIN);
  return 0;
}

int reclaim_start(const char *reason) {
  why = reason;
  return begin(TAKE);
}

int reclaim_idle(void) { return usage().memory < WORTH ? 0 : reclaim_start(REASON_IDLE); }

void reclaim_stop(void) {
  if (next_job == TAKE) next_job = NOTHING;
  if (child_pid && job == TAKE) cut_short();
}

void reclaim_bring(void) {
  uint64_t out = usage().swap;
  if (out && out <= BRING_MOST) begin(BRING);
}

void reclaim_end(void) {
  if (child_pid) cut_short();
  if (child_pid) while (waitpid(child_pid, NULL, 0) < 0 && errno == EINTR) {}
  child_pid = 0;
}

void reclaim_request(struct conn *c, const struct request *r) {
  if (A.paused || idle_for() < r->idle_ns) {
    conn_error(c, r->id, "unavailable", 0, "sandbox %s is %s", A.s->spec.id, A.paused ? "paused" : "in use");
    return;
  }
  if (reclaim_start(REASON_PRESSURE) || asker_add(&askers, c, r->id))
    conn_error(c, r->id, "resource_exhausted", 0, "no process for a reclaim of sandbox %s", A.s->spec.id);
}

void reclaim_forget(const struct conn *c) {
  asker_forget(askers, c);
}
