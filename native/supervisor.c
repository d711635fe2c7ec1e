// aether's life after READY: the event loop, its one timer, the lease, the sandbox's own events, and its end.
#include "aether.h"
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OOM_RECENT_NS (1000 * MS)

struct aether A;
static struct source timer_source, deadline_source, init_source, oom_source, wake_source;
static int wake_write = -1;
static volatile sig_atomic_t stop_signal;
static void **garbage;
static size_t garbage_n, garbage_cap;
static uint64_t reclaimed_at;          // A.touched when an idle sandbox's memory was last given back

// the loop --------------------------------------------------------------------------------------------------------------------------

void refresh(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  A.now = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
  clock_gettime(CLOCK_REALTIME, &t);
  A.real = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void touch(void) { A.touched = A.now; }

int set_blocking(int fd, int blocking) {
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return -1;
  return fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

// A source that waits for nothing is out of the epoll set, or a hang-up would wake us for ever.
void loop_want(struct source *src, uint32_t events) {
  if (src->fd < 0 || src->events == events) return;
  struct epoll_event e = {.events = events, .data.ptr = src};
  int op = !events ? EPOLL_CTL_DEL : src->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (epoll_ctl(A.epoll, op, src->fd, &e) && op != EPOLL_CTL_DEL) {
    fprintf(stderr, "aether %s: epoll_ctl: %s\n", A.s->spec.id, strerror(errno)); // out of kernel memory: we cannot supervise
    abort();
  }
  src->events = events;
}

void loop_close(struct source *src) {
  if (src->fd < 0) return;
  loop_want(src, 0);
  close(src->fd);
  src->fd = -1;
}

static void watch(struct source *src, int fd, void (*on)(struct source *, uint32_t)) {
  *src = (struct source){.on = on, .fd = fd};
  loop_want(src, EPOLLIN);
}

void loop_free(void *object) {
  if (garbage_n == garbage_cap) {
    size_t wider = garbage_cap ? garbage_cap * 2 : 64;
    void **p = realloc(garbage, wider * sizeof *p);
    if (!p) return;                    // leaked rather than reused while an event may still name it
    garbage = p;
    garbage_cap = wider;
  }
  garbage[garbage_n++] = object;
}

void loop_collect(void) {
  for (size_t i = 0; i < garbage_n; i++) free(garbage[i]);
  garbage_n = 0;
}

static struct timespec timespec_of(uint64_t ns) {
  return (struct timespec){.tv_sec = (time_t)(ns / 1000000000ull), .tv_nsec = (long)(ns % 1000000000ull)};
}

void timer_want(uint64_t when) {
  if (when >= A.armed) return;
  A.armed = when;
  struct itimerspec t = {.it_value = timespec_of(when)};
  if (!t.it_value.tv_sec && !t.it_value.tv_nsec) t.it_value.tv_nsec = 1;
  timerfd_settime(timer_source.fd, TFD_TIMER_ABSTIME, &t, NULL);
}

// the sandbox's own events -----------------------------------------------------------------------------------------------------------

static void tell(const char *name, const char *command, const char *message, const uint64_t *bytes) {
  for (struct conn *c = conns, *next; c; c = next) {
    next = c->next;
    if (!c->subscribed) continue;
    struct buf b = reply_buf();
    frame_begin(&b, F_EVENT, 0, c->subscribe_request);
    frame_text(&b, T_EVENT, name);
    if (command) frame_text(&b, T_COMMAND, command);
    if (message) frame_text(&b, T_MESSAGE, message);
    frame_text(&b, T_HEALTH, A.damaged ? "damaged" : "ok");
    frame_u64(&b, T_OOM_KILLS, A.oom_kills);
    if (bytes) frame_u64(&b, T_BYTES, *bytes);
    conn_reply(c, &b);
  }
}

void event(const char *name, const char *command, const char *message) { tell(name, command, message, NULL); }

void event_bytes(const char *name, const char *message, uint64_t bytes) { tell(name, NULL, message, &bytes); }

void counters_read(void) {
  uint64_t kills = sandbox_oom_kills(A.s), hits = sandbox_pids_hits(A.s);
  int oom = kills > A.oom_kills;
  if (oom) A.oom_at = A.now;
  A.oom_kills = kills;
  if (oom) event("oom", NULL, "a process was killed at the sandbox's memory limit");
  if (hits > A.pids_hits && !A.pids_hits) event("pids", NULL, "the sandbox reached its process limit");
  A.pids_hits = hits;
}

static void on_oom(struct source *src, uint32_t events) {
  (void)events;
  char buffer[4096];
  ssize_t n = read(src->fd, buffer, sizeof buffer);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) loop_want(src, 0); // the group is gone
  counters_read();
}

// PF_EXITING of init. While it goes it kills all inside and waits for us to reap our own, so its pidfd tells us only later.
int init_dying(void) {
  char path[32], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", A.s->init);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 1;
  text[n] = 0;
  char state;
  unsigned flags;
  char *p = strrchr(text, ')');
  if (!p || sscanf(p + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2) return 0;
  return state == 'Z' || state == 'X' || (flags & 4);
}

void init_died(void) {
  refresh();
  counters_read();
  int oom = A.oom_at && A.now - A.oom_at <= OOM_RECENT_NS;
  sandbox_end(oom ? "oom" : "agent_crash", oom ? "PID 1 was killed at the sandbox's memory limit" : "PID 1 of the sandbox died", NULL, 0);
}

static void on_init(struct source *src, uint32_t events) {
  (void)src;
  (void)events;
  if (A.s->channel > 0) sandbox_end("infra_lost", "the virtual machine of the sandbox ended", NULL, 0);
  init_died();
}

// time -------------------------------------------------------------------------------------------------------------------------------

static void on_deadline(struct source *src, uint32_t events);

static int attached(void) {
  for (struct conn *c = conns; c; c = c->next)
    for (struct sub *s = c->subs; s; s = s->next)
      if (s->kind == SUB_ATTACH || s->kind == SUB_STREAM) return 1;
  return 0;
}

void idle_again(void) {
  uint64_t first = NEVER, waits[] = {A.idle_ns, A.auto_pause_ns, A.s->spec.reclaim_ns};
  for (size_t i = 0; i < sizeof waits / sizeof *waits; i++)
    if (waits[i] && waits[i] < first) first = waits[i];
  if (first != NEVER) timer_want(A.now + first);
}

uint64_t idle_for(void) {
  if (A.running || A.helpers || attached()) touch();
  return A.now - A.touched;
}

// A timer on the wall clock: the kernel moves it when that clock is set, so nobody has to look from time to time.
static void deadline_watch(void) {
  static uint64_t watched;
  if (watched == A.deadline_real) return;
  if (deadline_source.fd < 0) {
    int fd = timerfd_create(CLOCK_REALTIME, TFD_CLOEXEC | TFD_NONBLOCK);
    if (fd < 0) { timer_want(A.now + 1000 * MS); return; } // out of descriptors: again soon
    watch(&deadline_source, fd, on_deadline);
  }
  struct itimerspec t = {.it_value = timespec_of(A.deadline_real)};
  if (!timerfd_settime(deadline_source.fd, TFD_TIMER_ABSTIME, &t, NULL)) watched = A.deadline_real;
}

// Ends the sandbox when its time is up, else says when to look again.
static uint64_t lease_tick(void) {
  uint64_t next = NEVER;
  if (A.deadline_real && A.real >= A.deadline_real) sandbox_end("expired", "the sandbox reached its maximum lifetime", NULL, 0);
  deadline_watch();                    // none: the timer is switched off
  if (A.idle_ns) {
    if (idle_for() >= A.idle_ns) sandbox_end("expired", "the sandbox was idle for its idle timeout", NULL, 0);
    uint64_t at = A.touched + A.idle_ns;
    if (at < next) next = at;
  }
  return next;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// An idle sandbox gives its memory back, then stands still; each once, until somebody wants something of it again.
static uint64_t idle_tick(void) {
  uint64_t reclaim = A.s->spec.reclaim_ns, pause = A.auto_pause_ns, next = NEVER;
  if (A.paused || !(reclaim | pause)) return NEVER;
  uint64_t idle = idle_for();
  if (reclaim && idle < reclaim) next = A.touched + reclaim;
  else if (reclaim && reclaimed_at != A.touched && !reclaim_idle()) reclaimed_at = A.touched;
  if (pause && idle < pause) next = least(next, A.touched + pause);
  else if (pause) next = least(next, pause_idle(REASON_IDLE));
  return next;
}

static void tick(void) {
  uint64_t next = commands_tick();
  next = least(next, sessions_tick());
  next = least(next, helpers_tick());
  next = least(next, tunnels_tick());
  next = least(next, pause_tick());
  next = least(next, restore_tick());
  next = least(next, snapshots_tick());
  next = least(next, machine_tick());
  if (groups_sweep() | starts_reap()) next = least(next, A.now + 1000 * MS);
  next = least(next, lease_tick());
  next = least(next, idle_tick());
  if (next != NEVER) timer_want(next < A.now + MS ? A.now + MS : next);
}

static void on_deadline(struct source *src, uint32_t events) {
  (void)events;
  uint64_t n;
  (void)!read(src->fd, &n, sizeof n);
  tick();
}

static void on_timer(struct source *src, uint32_t events) {
  (void)events;
  uint64_t n;
  if (read(src->fd, &n, sizeof n) < 0 && errno == EAGAIN) return;
  A.armed = NEVER;
  tick();
}

// Handlers, not ignored signals and no mask: exec gives what enters the sandbox the defaults again without anybody's help.
static void on_stop(int sig) {
  stop_signal = sig;
  int kept = errno;
  (void)!write(wake_write, "", 1);
  errno = kept;
}
static void on_nothing(int sig) { (void)sig; }

static void on_wake(struct source *src, uint32_t events) {
  (void)events;
  char drop[64];
  (void)!read(src->fd, drop, sizeof drop);
  if (stop_signal) sandbox_end("stopped", "the supervisor was asked to stop", NULL, 0);
}

// the end ----------------------------------------------------------------------------------------------------------------------------

static void json_text(FILE *f, const char *s) {
  fputc('"', f);
  for (; *s; s++) {
    unsigned char c = (unsigned char)*s;
    if (c == '"' || c == '\\') fprintf(f, "\\%c", c);
    else if (c < 0x20) fprintf(f, "\\u%04x", c);
    else fputc(c, f);
  }
  fputc('"', f);
}

static void write_end(const char *cause, const char *detail) {
  int fd = openat(A.state_dir, "end.json.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
  if (!f) { if (fd >= 0) close(fd); goto bad; }
  fputs("{\"cause\":", f);
  json_text(f, cause);
  fputs(",\"detail\":", f);
  json_text(f, detail);
  fprintf(f, ",\"time_ns\":%llu,\"oom_kills\":%llu,\"pids_hits\":%llu,\"health\":\"%s\"}\n", (unsigned long long)A.real,
          (unsigned long long)A.oom_kills, (unsigned long long)A.pids_hits, A.damaged ? "damaged" : "ok");
  int failed = ferror(f);
  if ((fclose(f) || failed) || renameat(A.state_dir, "end.json.tmp", A.state_dir, "end.json")) goto bad;
  return;
bad:
  fprintf(stderr, "aether %s: write %s/end.json: %s\n", A.s->spec.id, A.s->spec.state_dir, strerror(errno));
}

// Everything must die before anything is waited for: init's end waits until we have reaped what entered its pid namespace.
static void end_all(int lost) {
  refresh();
  A.ending = 1;
  loop_want(&init_source, 0);
  group_kill("");
  snapshots_end();                     // one that copies memory traces what it copies
  if (A.s->channel > 0) machine_end();
  commands_end(lost);
  sessions_end();
  helpers_end();
  reclaim_end();
  counters_read();
}

static void kill_all(void) {
  sandbox_kill(A.s);
  groups_end();
  // whoever waits for a command gets its end first
  for (int i = 0; i < 64 && conns_waiting(); i++) conns_pump();
}

static void flush_all(void) __attribute__((noreturn));
static void flush_all(void) {
  uint64_t began = A.now;
  for (struct conn *c = conns; c; c = c->next) {
    refresh();
    if (A.now - began > 1000 * MS) break;                // a reader that does not read finds what is on the disk
    conn_flush(c, 200);
  }
  _exit(0);
}

// No end of the sandbox: its files, records and logs stay, for another supervisor.
void sandbox_leave(int flag, struct conn *asker, uint32_t request) {
  struct usage u;
  struct fault f = {0};
  if (A.s->channel > 0 && flag == R_HIBERNATED) {
    if (A.paused) pause_end();
    if (machine_freeze(&f)) { conn_error(asker, request, f.code, f.err, "%s", f.message); return; }
  }
  A.leaving = flag;
  end_all(0);
  kill_all();
  sandbox_usage(A.s, &u);
  if (flag == R_HIBERNATED) sandbox_rest(A.s);
  A.s->spec.keep = 1;
  sandbox_remove(A.s);
  struct buf b = reply_buf();
  frame_begin(&b, F_LEFT, 0, request);
  frame_u64(&b, T_DISK_USED, u.disk);
  frame_u64(&b, T_TIME_NS, A.real);
  conn_reply(asker, &b);
  flush_all();
}

void sandbox_end(const char *cause, const char *detail, struct conn *asker, uint32_t request) {
  end_all(strcmp(cause, "stopped") && strcmp(cause, "expired") && strcmp(cause, "evicted"));
  write_end(cause, detail);            // while PID 1 dies
  kill_all();
  sandbox_remove(A.s);
  for (struct conn *c = conns; c; c = c->next) {
    if (!c->hello) continue;
    struct buf b = reply_buf();
    frame_begin(&b, F_ENDED, 0, c == asker ? request : c->subscribed ? c->subscribe_request : 0);
    frame_text(&b, T_CAUSE, cause);
    frame_text(&b, T_MESSAGE, detail);
    frame_u64(&b, T_TIME_NS, A.real);
    frame_u64(&b, T_OOM_KILLS, A.oom_kills);
    conn_reply(c, &b);
    if (c == asker && c->subscribed && request != c->subscribe_request) {
      frame_begin(&b, F_ENDED, 0, c->subscribe_request);
      frame_text(&b, T_CAUSE, cause);
      frame_text(&b, T_MESSAGE, detail);
      frame_u64(&b, T_TIME_NS, A.real);
      frame_u64(&b, T_OOM_KILLS, A.oom_kills);
      conn_reply(c, &b);
    }
  }
  flush_all();
}

// ------------------------------------------------------------------------------------------------------------------------------------

static void catch(int sig, void (*fn)(int)) {
  struct sigaction a = {.sa_handler = fn, .sa_flags = SA_RESTART};
  sigaction(sig, &a, NULL);
}

static void fatal(const char *what) {
  fprintf(stderr, "aether %s: %s: %s\n", A.s->spec.id, what, strerror(errno));
  sandbox_kill(A.s);
  sandbox_remove(A.s);
  _exit(1);
}

static void setup(struct sandbox *s) {
  A = (struct aether){.s = s, .epoll = -1, .state_dir = -1, .armed = NEVER, .deadline_real = s->spec.deadline_ns, .idle_ns = s->spec.idle_ns,
                      .auto_pause_ns = s->spec.auto_pause_ns};
  struct rlimit files;
  if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  int pipes[2];
  if (pipe2(pipes, O_CLOEXEC | O_NONBLOCK)) fatal("pipe");
  wake_write = pipes[1];
  catch(SIGTERM, on_stop);
  catch(SIGINT, on_stop);
  catch(SIGHUP, on_nothing);
  catch(SIGPIPE, on_nothing);
  signal(SIGCHLD, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  refresh();
  touch();
  A.epoll = epoll_create1(EPOLL_CLOEXEC);
  if (A.epoll < 0) fatal("epoll_create1");
  A.state_dir = open(s->spec.state_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (A.state_dir < 0) fatal(s->spec.state_dir);
  log_setup(A.state_dir, s->spec.log_budget);
  if (records_setup(A.state_dir)) fatal("commands.bin");
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
  if (timer < 0) fatal("timerfd_create");
  watch(&timer_source, timer, on_timer);
  deadline_source.fd = -1;
  watch(&wake_source, pipes[0], on_wake);
  watch(&init_source, s->init_fd, on_init);
  if (s->oom_fd >= 0) {
    if (set_blocking(s->oom_fd, 0)) fatal("the OOM descriptor");
    watch(&oom_source, s->oom_fd, on_oom);
  }
  if (s->channel > 0) machine_open(s);
  if (conn_listen(s->listen_fd)) fatal("the listening socket");
  A.oom_kills = sandbox_oom_kills(s);
  A.pids_hits = sandbox_pids_hits(s);
  tick();
}

void aether_main(struct sandbox *s) {
  setup(s);
  s->spec.keep = 0;
  for (;;) {
    struct epoll_event events[64];
    int n = epoll_wait(A.epoll, events, 64, conns_waiting() ? 0 : -1);
    if (n < 0 && errno != EINTR) fatal("epoll_wait");
    refresh();
    for (int i = 0; i < n; i++) {
      struct source *src = events[i].data.ptr;
      if (src->fd >= 0 && src->events) src->on(src, events[i].events);
    }
    conns_pump();
    groups_dropped();
    loop_collect();
  }
}
