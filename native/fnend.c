// Calls that run: their output, their limits of time, their end, and what the host saw of it.
#include "fnrun.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>
#include "util.h"

#define READ_MOST (4u << 20)           // of one stream in one turn
#define COLLECT_MOST (32u << 20)       // of one file that is sent
#define FD_OF(c, i) ((c)->stream[i].fd)

// ---- output -------------------------------------------------------------------------------------------------------------------------------

static int keep(struct stream *s, const uint8_t *p, size_t n) {
  s->total += n;
  size_t room = s->most > s->n ? s->most - s->n : 0, take = n < room ? n : room;
  if (s->n + take > s->cap) {
    size_t wider = 2 * (s->n + take);
    uint8_t *to = realloc(s->p, wider);
    if (!to) return 0;                 // counted as dropped
    s->p = to;
    s->cap = wider;
  }
  if (take) memcpy(s->p + s->n, p, take);
  s->n += take;
  return take < n;
}

// The first byte of a warm call's value is from its process before it was given anything: it is in its box.
static void armed(struct call *c, const uint8_t **p, size_t *n) {
  if (c->armed || !*n) return;
  c->armed = 1;
  if (**p != 1) {
    fprintf(stderr, "aether %s: an interpreter's child did not come in: %.*s\n", c->box.id, (int)(*n < 200 ? *n : 200), (const char *)*p);
    c->forced = END_LOST;
  }
  ++*p;
  --*n;
  struct fault f = {0};
  if (c->state == STARTING && !c->forced && call_job(c, &f)) c->forced = END_LOST;
}

static void take(struct call *c, int which) {
  static uint8_t bytes[65536];
  struct stream *s = &c->stream[which];
  for (size_t all = 0; s->fd >= 0 && all < READ_MOST;) {
    ssize_t n = read(s->fd, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) { close_fd(&s->fd); return; }
    all += (size_t)n;
    const uint8_t *p = bytes;
    size_t size = (size_t)n;
    if (which == VALUE) armed(c, &p, &size);
    if (!keep(s, p, size)) continue;
    c->hits |= LIMIT_OUTPUT;
    if (!(c->flags & FN_STOP_AT_OUTPUT) || which == VALUE || c->forced) continue;
    c->forced = END_OUTPUT_LIMIT;
    fnbox_kill(&c->box);
  }
}

// ---- the end ------------------------------------------------------------------------------------------------------------------------------

static void measure(struct call *c) {
  struct fn_result *r = &c->result;
  struct usage u = {0};
  struct statfs disk;
  cgroup_usage(&c->box.s, &u);
  r->wall_ns = c->began ? now_ns() - c->began : 0;
  r->cpu_ns = c->began ? call_cpu(c) : 0;
  r->memory_peak = u.memory_peak;
  r->out_total = c->stream[OUT].total;
  r->err_total = c->stream[ERR].total;
  r->value_total = c->stream[VALUE].total;
  if (u.oom_kills) c->hits |= LIMIT_MEMORY;
  if (u.pids_hits) c->hits |= LIMIT_PIDS;
  if (!fstatfs(c->box.scratch, &disk) && (!disk.f_bfree || !disk.f_ffree)) c->hits |= LIMIT_DISK;
  if (c->cpu_most && r->cpu_ns > c->cpu_most) c->hits |= FN_HIT_CPU;
}

static void verdict(struct call *c, int status) {
  struct fn_result *r = &c->result;
  r->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  r->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (r->signal == SIGXFSZ) c->hits |= LIMIT_DISK;
  if (r->signal == SIGXCPU) c->hits |= FN_HIT_CPU;
  if (c->forced) r->ending = c->forced;
  else if (r->signal == SIGXCPU) r->ending = END_TIMEOUT;
  else if (r->signal == SIGKILL && c->hits & LIMIT_MEMORY) r->ending = END_OOM;
  else r->ending = r->signal ? END_SIGNALED : END_EXITED;
  r->hits = c->hits;
}

static void answer(struct call *c) {
  uint8_t space[512];
  struct buf b = {.data = space, .cap = sizeof space};
  uint8_t part = c->part ? 128 : 0;
  for (int i = 0; i < STREAMS; i++) reply_data(c->request, (uint8_t)(part | (i + 1)), c->stream[i].p, c->stream[i].n);
  frame_begin(&b, F_FN_END, c->part, c->request);
  frame_bytes(&b, T_FN_RESULT, &c->result, sizeof c->result);
  reply_frame(&b);
}

static void send_file(struct call *c, int i, int fd, struct fault *f) {
  struct stat st;
  uint8_t *bytes = fstat(fd, &st) || st.st_size > COLLECT_MOST ? NULL : malloc((size_t)st.st_size + 1);
  ssize_t n = bytes ? pread(fd, bytes, (size_t)st.st_size, 0) : -1;
  if (n < 0) fault_host(f, errno, "read %.100s", c->collect[i].name);
  else if (n) reply_data(c->request, (uint8_t)(16 + i), bytes, (size_t)n);
  free(bytes);
}

// What it asked to be handed back. A file that is not there is no fault of the platform: it is missing in the answer.
static void hand_back(struct call *c) {
  int work = fnbox_work(&c->box);
  for (int i = 0; work >= 0 && i < c->ncollect; i++) {
    struct fault f = {0};
    int fd = file_get(work, c->collect[i].name, c->collect[i].most, &f), copy;
    if (fd >= 0 && !c->collect[i].keep) send_file(c, i, fd, &f);
    if (fd >= 0 && c->collect[i].keep) {
      if ((copy = input_make()) < 0 || fd_copy(fd, copy, c->collect[i].most)) fault_host(&f, errno, "keep %.100s", c->collect[i].name);
      else if (shared_take(c->collect[i].keep, copy, &f)) close(copy);
    }
    close_fd(&fd);
    // a frame of its own tells which ones are there, empty ones too
    uint8_t space[512];
    struct buf b = {.data = space, .cap = sizeof space};
    frame_begin(&b, F_STATUS, (uint8_t)i, c->request);
    if (f.code) frame_text(&b, T_CODE, f.code);
    reply_frame(&b);
  }
  close_fd(&work);
}

// Its program ended with this status. Everything that it left running is killed; what it wrote is in its pipes.
static void end(struct call *c, int status) {
  fnbox_kill(&c->box);
  for (int i = 0; i < STREAMS; i++) take(c, i);
  measure(c);
  verdict(c, status);
  c->state = ENDING;
  if (c->given && !c->ncollect) {
    answer(c);
    c->given = 0;
  }
  if (!c->given) call_forget(c);
}

static void started(struct call *c) {
  struct fault f = {0};
  int bad = start_done(&c->start, &c->pid, &c->pidfd, &f);
  close_fd(&c->start.status);
  if (!bad) {
    c->state = RUNNING;
    return;
  }
  c->state = ENDING;
  fnbox_kill(&c->box);
  if (c->given) reply_fault(c->request, &f);
  for (int i = 0; i < FN_BOXES; i++)   // the other one of a pair has nobody to talk to
    if (&calls[i] != c && calls[i].given && calls[i].request == c->request) call_spoil(&calls[i]);
  c->given = 0;
  call_forget(c);
}

static void exited(struct call *c) {
  struct rusage use = {0};
  int status = 0;
  if (wait4(c->pid, &status, WNOHANG, &use) == 0) return;
  close_fd(&c->pidfd);
  c->pid = 0;
  c->result.rss = (uint64_t)use.ru_maxrss * 1024;
  end(c, status);
}

void calls_zygote(uint64_t serial, int status, uint64_t rss) {
  for (int i = 0; i < FN_BOXES; i++) {
    struct call *c = &calls[i];
    if (c->state == FREE || !c->warm || c->serial != serial || c->state == ENDING) continue;
    take(c, VALUE);                    // its word that it was in may still be there
    c->result.rss = rss;
    if (!c->given || !c->armed) c->forced = END_LOST;
    end(c, status);
  }
}

// ---- the loop's side ------------------------------------------------------------------------------------------------------------------------

static int reaped(struct call *c) {
  if (c->pid > 0 && c->pidfd < 0 && c->state == ENDING) waitpid(c->pid, NULL, WNOHANG); // one that was spoiled
  starts_reap();
  return fnbox_dead(&c->box);
}

static void settle(struct call *c) {
  if (!reaped(c)) return;
  if (c->given) {
    hand_back(c);
    answer(c);
    c->given = 0;
  }
  call_forget(c);
  fnbox_remove(&c->box);
  c->state = FREE;
}

int calls_poll(struct pollfd *p, int most, uint64_t *wake) {
  int n = 0;
  for (int i = 0; i < FN_BOXES && n + 5 <= most; i++) {
    struct call *c = &calls[i];
    if (c->state == FREE) continue;
    for (int k = 0; k < STREAMS; k++)
      if (FD_OF(c, k) >= 0 && c->state != ENDING) p[n++] = (struct pollfd){.fd = FD_OF(c, k), .events = POLLIN};
    if (c->state == STARTING && !c->warm) p[n++] = (struct pollfd){.fd = c->start.status, .events = POLLIN};
    if (c->state == RUNNING && !c->warm) p[n++] = (struct pollfd){.fd = c->pidfd, .events = POLLIN};
    if (c->state == ENDING) p[n++] = (struct pollfd){.fd = c->box.s.init_fd, .events = POLLIN};
    if (c->state == RUNNING) {
      uint64_t at = c->began + c->wall_most;
      if (c->cpu_most && c->cpu_next < at) at = c->cpu_next;
      if (at < *wake) *wake = at;
    }
  }
  return n;
}

static int has(const struct pollfd *p, int n, int fd) {
  for (int i = 0; fd >= 0 && i < n; i++)
    if (p[i].fd == fd) return p[i].revents;
  return 0;
}

void calls_serve(const struct pollfd *p, int n) {
  for (int i = 0; calls && i < FN_BOXES; i++) {
    struct call *c = &calls[i];
    if (c->state == FREE) continue;
    if (c->state == ENDING) {
      settle(c);
      continue;
    }
    for (int k = 0; k < STREAMS; k++)
      if (has(p, n, FD_OF(c, k))) take(c, k);
    if (c->state == STARTING && !c->warm && has(p, n, c->start.status)) started(c);
    else if (c->state == RUNNING && !c->warm && has(p, n, c->pidfd)) exited(c);
  }
}

void calls_tick(void) {
  uint64_t now = now_ns();
  for (int i = 0; i < FN_BOXES; i++) {
    struct call *c = &calls[i];
    if (c->state != RUNNING || c->forced) continue;
    if (now >= c->began + c->wall_most) {
      c->forced = END_TIMEOUT;
      c->hits |= FN_HIT_WALL;
    } else if (c->cpu_most && now >= c->cpu_next) {
      uint64_t used = call_cpu(c), left = used < c->cpu_most ? (c->cpu_most - used) / 2 : 0;
      if (!left) {
        c->forced = END_TIMEOUT;
        c->hits |= FN_HIT_CPU;
      } else c->cpu_next = now + (left > LOOK_NS ? left : LOOK_NS);
    }
    if (c->forced) fnbox_kill(&c->box);
  }
}
