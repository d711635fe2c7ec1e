// See hand.h.
#include "hand.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "mux.h"
#include "node.h"
#include "start.h"
#include "util.h"

#define LOOK_MS 50                     // at programs that start, and at those that a tracer holds
#define UNCONNECTED_US 2000
#define GROUP_SIZE (ID_SIZE + 4)
#define ORDERS 3                       // one makes the container; the last one but one is still in use when the next comes
#define UID_BASE (1u << 20)            // a guest has one sandbox: all have the same ids, whatever their disk was before

struct task {                          // what was started for the supervisor: a program, or a file operation
  struct task *next;
  struct source status, process;
  struct start start;
  uint32_t id;
  pid_t pid;
  char group[GROUP_SIZE];
  int terminal;                        // -1: none
  uint8_t traced, ended, file;
  struct { int code, status; uint64_t cpu, peak; } how;
};
static struct task *tasks;
static struct sandbox sandbox;
static struct order order;
static struct source init_source, oom_source;
static uint8_t creating[ORDERS][WIRE_MAX]; // the specs' strings point into it
static char hostname[65];

static struct task *find(uint32_t id) {
  struct task *t = tasks;
  while (t && t->id != id) t = t->next;
  return t;
}

static void forget(struct task *t) {
  for (struct task **p = &tasks; *p; p = &(*p)->next)
    if (*p == t) { *p = t->next; break; }
  loop_close(&t->status);
  loop_close(&t->process);
  close_fd(&t->terminal);
  loop_free(t);
}

// telling the supervisor ----------------------------------------------------------------------------------------------------------------

static void answer(uint8_t type, uint32_t id, const struct fault *f) {
  struct buf b = mux_buf();
  frame_begin(&b, type, 0, id);
  if (type == H_READY) frame_u64(&b, T_VERSION_MAJOR, HAND_VERSION);
  if (f && f->code) {
    frame_text(&b, T_CODE, f->code);
    frame_text(&b, T_MESSAGE, f->message);
    frame_u64(&b, T_ERRNO, (uint64_t)f->err);
  }
  mux_send(&b);
}

static void tell_status(uint32_t id) {
  struct usage u;
  struct buf b = mux_buf();
  sandbox_usage(&sandbox, &u);
  frame_begin(&b, H_STATUS, 0, id);
  usage_fields(&u, &b);
  frame_u64(&b, T_DISK_FULL, (uint64_t)(sandbox_disk_full(&sandbox) != 0));
  frame_u64(&b, T_SHELL, (uint64_t)(sandbox_shell_replaced(&sandbox) != 0));
  mux_send(&b);
}

// The counters first: what became of it is judged by them.
static void tell_end(struct task *t) {
  if (!t->ended || flow_owes(t->id + FLOW_OUT) || flow_owes(t->id + FLOW_ERR)) return;
  tell_status(0);
  struct buf b = mux_buf();
  frame_begin(&b, H_EXIT, 0, t->id);
  frame_u64(&b, T_STATE, (uint64_t)t->how.code);
  frame_u64(&b, T_SIGNAL, (uint64_t)t->how.status);
  frame_u64(&b, T_CPU_USED_NS, t->how.cpu);
  frame_u64(&b, T_MEMORY_PEAK, t->how.peak);
  mux_send(&b);
  forget(t);
}

static void told(uint32_t flow) {
  struct task *t = find(flow - flow % FLOWS_EACH);
  if (t) tell_end(t);
}

static void on_init(struct source *src, uint32_t events) {
  (void)events;
  loop_want(src, 0);
  tell_status(0);
  answer(H_GONE, 0, NULL);
}

static void on_oom(struct source *src, uint32_t events) {
  (void)events;
  char drop[4096];
  (void)!read(src->fd, drop, sizeof drop);
  tell_status(0);
}

// programs ------------------------------------------------------------------------------------------------------------------------------

// What it wrote before it ended goes before its end.
static void owe(uint32_t id) {
  struct flow *w = flow_find(id);
  int n = 0;
  if (w && w->sends && !ioctl(w->src.fd, FIONREAD, &n) && n > 0) w->owed = (uint64_t)n;
}

static void on_process(struct source *src, uint32_t events) {
  (void)events;
  struct task *t = OWNER(src, struct task, process);
  siginfo_t info = {0};
  struct rusage u = {0};
  if (syscall(SYS_waitid, P_PIDFD, src->fd, &info, WEXITED | WNOHANG, &u)) return;
  if (!info.si_pid) {                  // a tracer inside holds it
    if (t->traced) tracers_kill(t->pid);
    t->traced = 1;
    loop_want(src, 0);
    return;
  }
  loop_close(src);
  if (t->file) { forget(t); return; }
  t->how.code = info.si_code;
  t->how.status = info.si_status;
  t->how.cpu = ((uint64_t)u.ru_utime.tv_sec + (uint64_t)u.ru_stime.tv_sec) * 1000000000ull +
               ((uint64_t)u.ru_utime.tv_usec + (uint64_t)u.ru_stime.tv_usec) * 1000ull;
  t->how.peak = (uint64_t)u.ru_maxrss * 1024;
  t->ended = 1;
  owe(t->id + FLOW_OUT);
  owe(t->id + FLOW_ERR);
  tell_end(t);
}

static int inner_pid(pid_t pid) {
  char path[40], text[2048];
  snprintf(path, sizeof path, "/proc/%d/status", pid);
  if (read_at(AT_FDCWD, path, text, sizeof text) < 0) return 0;
  char *line = strstr(text, "\nNSpid:"), *end = line ? strchr(line + 1, '\n') : NULL;
  if (!end) return 0;
  *end = 0;
  char *last = strrchr(line + 1, '\t');
  return last ? atoi(last + 1) : 0;
}

static void failed(struct task *t, const struct fault *f) {
  for (uint32_t i = 0; i < FLOWS_EACH; i++) flow_end(t->id + i);
  answer(H_FAILED, t->id, f);
  forget(t);
}

static void tell_started(const struct task *t) {
  struct buf b = mux_buf();
  frame_begin(&b, H_STARTED, 0, t->id);
  frame_u64(&b, T_PID, (uint64_t)inner_pid(t->pid));
  mux_send(&b);
}

static void on_status(struct source *src, uint32_t events) {
  (void)events;
  struct task *t = OWNER(src, struct task, status);
  struct fault f = {0};
  int pidfd = -1;
  if (start_done(&t->start, &t->pid, &pidfd, &f)) { failed(t, &f); return; }
  loop_close(src);
  tell_started(t);
  t->process = (struct source){.on = on_process, .fd = pidfd};
  loop_want(&t->process, EPOLLIN);
}

struct wanted { const char *argv[MAX_ARGS + 1], *env[2 * MAX_ENV + 1], *shell, *cwd, *user, *group; size_t argc, envc; uint64_t flags, rows, cols, signal; const char *hostname; };

static int decode(struct wanted *w, const uint8_t *payload, size_t size) {
  struct cursor c = {payload, payload + size};
  struct item i;
  const char *s;
  int more;
  memset(w, 0, sizeof *w);
  while ((more = field_next(&c, &i)) > 0) {
    int bad = 0;
    switch (i.tag) {
      case T_ARG: bad = w->argc == MAX_ARGS || field_text(&i, &s); if (!bad) w->argv[w->argc++] = s; break;
      case T_ENV: bad = w->envc == 2 * MAX_ENV || field_text(&i, &s); if (!bad) w->env[w->envc++] = s; break;
      case T_SHELL: bad = field_text(&i, &w->shell); break;
      case T_CWD: bad = field_text(&i, &w->cwd); break;
      case T_USER: bad = field_text(&i, &w->user); break;
      case T_CGROUP: bad = field_text(&i, &w->group); break;
      case T_HOSTNAME: bad = field_text(&i, &w->hostname); break;
      case T_EXEC_FLAGS: bad = field_u64(&i, &w->flags); break;
      case T_ROWS: bad = field_u64(&i, &w->rows); break;
      case T_COLS: bad = field_u64(&i, &w->cols); break;
      case T_SIGNAL: bad = field_u64(&i, &w->signal); break;
      default: bad = 1;
    }
    if (bad) return -1;
  }
  return more ? -1 : 0;
}

struct ends { int in[2], out[2], err[2]; };             // read, write

static int make_ends(struct task *t, const struct wanted *w, struct ends *e, struct fault *f) {
  if (w->flags & X_PTY) {
    int master = sandbox_pty(&sandbox, (int)w->rows, (int)w->cols, &e->in[0], f);
    if (master < 0) return -1;
    t->terminal = fcntl(master, F_DUPFD_CLOEXEC, 3);
    e->in[1] = fcntl(master, F_DUPFD_CLOEXEC, 3);
    e->out[0] = master;
    e->out[1] = fcntl(e->in[0], F_DUPFD_CLOEXEC, 3);
    return e->in[1] < 0 || e->out[1] < 0 || t->terminal < 0 ? fault_host(f, errno, "prepare a terminal") : 0;
  }
  if ((w->flags & X_STDIN && pipe2(e->in, O_CLOEXEC)) || pipe2(e->out, O_CLOEXEC) || (!(w->flags & X_MERGE) && pipe2(e->err, O_CLOEXEC)))
    return fault_host(f, errno, "make a pipe");
  return 0;
}

static struct task *task_new(uint32_t id) {
  struct task *t = find(id) ? NULL : calloc(1, sizeof *t);
  if (!t) return NULL;
  *t = (struct task){.next = tasks, .status.fd = -1, .process.fd = -1, .id = id, .terminal = -1};
  tasks = t;
  return t;
}

static int begin(struct task *t, const struct wanted *w, struct fault *f) {
  struct ends e = {{-1, -1}, {-1, -1}, {-1, -1}};
  int group = -1, bad = -1;
  snprintf(t->group, sizeof t->group, "%s", w->group);
  if (!make_ends(t, w, &e, f) && (group = group_make(t->group, f)) >= 0) {
    struct entry x = {.argv = w->shell ? NULL : w->argv, .env = w->envc ? w->env : NULL, .shell_text = w->shell, .cwd = w->cwd, .user = w->user,
                      .in = e.in[0], .out = e.out[1], .err = e.err[1] >= 0 ? e.err[1] : e.out[1], .tty = (w->flags & X_PTY) != 0,
                      .ctl = -1, .cgroup_fd = group, .keep = -1};
    bad = sandbox_enter(&sandbox, &x, &t->start, f);
  }
  close_fd(&group);
  close_fd(&e.in[0]);
  close_fd(&e.out[1]);
  close_fd(&e.err[1]);
  int lost = 0;
  if (!bad) {                          // each takes its descriptor
    if (e.in[1] >= 0) lost |= flow_receive(t->id + FLOW_IN, e.in[1]);
    lost |= flow_send(t->id + FLOW_OUT, e.out[0]);
    if (e.err[0] >= 0) lost |= flow_send(t->id + FLOW_ERR, e.err[0]);
  } else {
    close_fd(&e.in[1]);
    close_fd(&e.out[0]);
    close_fd(&e.err[0]);
  }
  if (lost) {
    start_abandon(&t->start);
    close_fd(&t->start.status);
    return fault_set(f, "resource_exhausted", ENOMEM, "connect the streams of a program");
  }
  return bad;
}

static void spawn(uint32_t id, const uint8_t *payload, size_t size) {
  static struct wanted w;
  struct fault f = {0};
  struct task *t = task_new(id);
  if (!t) return;
  if (decode(&w, payload, size) || !w.group || strlen(w.group) >= GROUP_SIZE || strchr(w.group, '/') || *w.group == '.')
    fault_set(&f, "internal", 0, "a malformed order to start a program");
  else if (!begin(t, &w, &f)) {
    t->status = (struct source){.on = on_status, .fd = t->start.status};
    loop_want(&t->status, EPOLLIN);
    return;
  }
  failed(t, &f);
}

static void file(uint32_t id, const uint8_t *payload, size_t size) {
  struct cursor c = {payload, payload + size};
  struct item it;
  uint64_t number = 0;
  const char *user = NULL;
  struct fault f = {0};
  int pair[2] = {-1, -1}, pidfd = -1;
  struct task *t = task_new(id);
  if (!t) return;
  t->file = 1;
  if (field_next(&c, &it) != 1 || it.tag != T_OFFSET || field_u64(&it, &number)) { failed(t, &f); return; }
  struct file_request request = {.request = (uint32_t)number, .fields = c.p, .size = (size_t)(c.end - c.p)};
  for (struct cursor u = c; field_next(&u, &it) > 0;)
    if (it.tag == T_USER) (void)field_text(&it, &user);
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) fault_host(&f, errno, "make a pair of sockets");
  else {
    request.conn = pair[1];
    struct entry x = {.user = user && *user ? user : NULL, .in = -1, .out = -1, .err = -1, .ctl = -1, .cgroup_fd = sandbox.cgroup_fd, .light = 1,
                      .run = file_serve, .arg = &request, .keep = pair[1]};
    t->pid = sandbox_enter_now(&sandbox, &x, &pidfd, &f);
  }
  if (!f.code && (flow_receive(id + FLOW_IN, fcntl(pair[0], F_DUPFD_CLOEXEC, 3)) || flow_send(id + FLOW_OUT, fcntl(pair[0], F_DUPFD_CLOEXEC, 3))))
    fault_host(&f, errno, "connect a file operation");
  if (!f.code) {
    close_fd(&pair[0]);
    close_fd(&pair[1]);
    t->process = (struct source){.on = on_process, .fd = pidfd};
    loop_want(&t->process, EPOLLIN);
    return;
  }
  // its client gets the error where it waits for an answer
  struct buf b = mux_buf();
  frame_begin(&b, F_ERROR, 0, request.request);
  frame_text(&b, T_CODE, f.code);
  frame_text(&b, T_MESSAGE, f.message);
  frame_u64(&b, T_ERRNO, (uint64_t)f.err);
  if (pair[1] >= 0) (void)frame_send(pair[1], &b);
  if (pidfd >= 0) kill(t->pid, SIGKILL);
  close_fd(&pidfd);
  close_fd(&pair[1]);
  if (pair[0] >= 0) (void)flow_send(id + FLOW_OUT, pair[0]);
  forget(t);
}

// orders ---------------------------------------------------------------------------------------------------------------------------------

static void make(struct spec *c, struct fault *f) {
  static char run[96], state[96];
  int userns = -1;
  snprintf(run, sizeof run, "%s/%.64s", node.run, c->id);
  snprintf(state, sizeof state, "%s/%.64s", node.state, c->id);
  c->run_dir = run;
  c->state_dir = state;
  c->cgroup = node.cgroup;
  c->medium = MEDIUM_GUEST;
  c->disk_bytes = 1;                   // it has an end, which the disk tells
  c->userns = 1;
  c->uid_base = UID_BASE;
  if (guest_disk(c, f) || (userns = userns_get(UID_BASE, f)) < 0) return;
  sandbox_create(&sandbox, c, userns, f);
}

static int orders;                     // CREATEs that came
static char signed_by[80];             // whose the disk is

// A template may have the container already; then its first supervisor takes it over.
static void create(const uint8_t *payload, size_t size) {
  struct fault f = {0};
  struct frame h = {.type = H_CREATE};
  if ((orders > 1 && !mux_is_quiet()) || size > sizeof creating[0]) { answer(H_FAILED, 0, &f); return; }
  uint8_t *own = creating[orders ? 1 + (orders & 1) : 0];
  memcpy(own, payload, size);
  if (mux_is_quiet()) mux_restart();
  int bad = order_read(&order, &h, own, size, &f) || guest_awake(&order, &f);
  if (!bad && !orders) make(&order.spec, &f);
  else if (!bad && (guest_freeze(0), sandbox.init_fd < 0)) fault_set(&f, "internal", 0, "the container of the template is not there");
  else if (!bad && !guest_sign(signed_by, order.spec.id, &f)) sandbox_adopt(&sandbox, &order.spec, orders > 1, &f);
  orders++;
  if (order.spec.id) snprintf(signed_by, sizeof signed_by, "%s", order.spec.id);
  if (f.code) { answer(H_FAILED, 0, &f); return; }
  if (orders > 1) { answer(H_READY, 0, NULL); return; }
  A.s = &sandbox;
  init_source = (struct source){.on = on_init, .fd = sandbox.init_fd};
  loop_want(&init_source, EPOLLIN);
  oom_source = (struct source){.on = on_oom, .fd = sandbox.oom_fd};
  if (sandbox.oom_fd >= 0 && !set_blocking(sandbox.oom_fd, 0)) loop_want(&oom_source, EPOLLIN);
  answer(H_READY, 0, NULL);
}

static void kill_task(struct task *t) {
  if (t->file) { if (t->pid > 0) kill(t->pid, SIGKILL); return; }
  if (t->status.fd >= 0) {
    struct fault f = {0};
    start_abandon(&t->start);
    fault_set(&f, "internal", 0, "it was killed before it started");
    failed(t, &f);
    return;
  }
  group_kill(t->group);
}

static void about(uint8_t type, uint32_t id, const uint8_t *payload, size_t size) {
  static struct wanted w;
  struct task *t = id ? find(id) : NULL;
  struct fault f = {0};
  if (decode(&w, payload, size) || (!id && !w.group && type != H_THAW)) return;
  int named = w.group && *w.group && !strchr(w.group, '/') && strlen(w.group) < GROUP_SIZE;
  switch (type) {
    case H_SIGNAL:
      if (named) group_signal(w.group, (int)w.signal, NULL, 0);
      else if (t && t->pid > 0 && !t->ended) kill(t->pid, (int)w.signal);
      break;
    case H_KILL:
      if (named) group_kill(w.group);
      else if (t) kill_task(t);
      break;
    case H_DROP: if (named) group_drop(w.group); break;
    case H_RESIZE: {
      struct winsize size_of = {.ws_row = (unsigned short)w.rows, .ws_col = (unsigned short)w.cols};
      if (t && t->terminal >= 0) (void)ioctl(t->terminal, TIOCSWINSZ, &size_of);
      break;
    }
    case H_FREEZE:
      if (guest_freeze(1)) fault_host(&f, errno, "write the disk back");
      answer(H_DONE, id, &f);
      break;
    case H_HOLD:
      if (guest_freeze(1)) fault_host(&f, errno, "write the disk back");
      answer(H_DONE, id, &f);
      mux_flush(1000);
      if (!f.code) mux_quiet(1);
      break;
    case H_THAW:
      (void)guest_freeze(0);
      mux_quiet(0);
      break;
    case H_ADOPT:
      if (t && !t->file && t->status.fd < 0 && !t->ended) tell_started(t);
      else answer(H_FAILED, id, &f);
      break;
    case H_RENAME:
      snprintf(hostname, sizeof hostname, "%s", w.hostname ? w.hostname : "");
      (void)sandbox_rename(&sandbox, hostname, &f);
      answer(H_DONE, id, &f);
      break;
    default: break;
  }
}

static void frame(uint8_t type, uint32_t id, const uint8_t *payload, size_t size) {
  if (type == H_CREATE) { create(payload, size); return; }
  if (!sandbox.spec.id || sandbox.init_fd < 0) return;
  switch (type) {
    case H_SPAWN: spawn(id, payload, size); break;
    case H_FILE: file(id, payload, size); break;
    case H_STAT: tell_status(id); break;
    default: about(type, id, payload, size);
  }
}

static void lost(const char *why) { guest_die("channel", why); }

// A port that nobody has connected to on the host reads as an end. In a copy of a machine a supervisor is on its way.
static int alone(void) {
  if (orders > 1 && !mux_is_quiet()) return 0;
  usleep(UNCONNECTED_US);
  return 1;
}

// ------------------------------------------------------------------------------------------------------------------------------------------

// 1: somebody has to be looked at again soon
static int look(void) {
  int again = starts_reap() > 0;
  for (struct task *t = tasks, *next; t; t = next) {
    next = t->next;
    if (t->status.fd >= 0) {
      struct fault f = {0};
      again = 1;
      if (start_look(&t->start, &f)) { start_abandon(&t->start); failed(t, &f); }
    } else if (t->traced && t->process.fd >= 0) {
      again = 1;
      on_process(&t->process, 0);
    }
  }
  return again | groups_sweep();
}

static int connected(void) {
  int fd = guest_port();
  (void)!write(fd, "up\n", 3);         // a template may be taken
  for (;;) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, -1) > 0 && p.revents & POLLIN) return fd;
    usleep(UNCONNECTED_US);
  }
}

void hand_main(void) {
  static const struct mux_user user = {frame, told, lost, alone};
  static char title[16] = "hand";
  node.title = title;
  node.title_size = sizeof title;
  signal(SIGPIPE, SIG_IGN);
  guest_boot();
  A = (struct aether){.s = &sandbox, .epoll = epoll_create1(EPOLL_CLOEXEC), .armed = 0};
  sandbox.init_fd = -1;
  mux_user = &user;
  if (mux_open(connected())) guest_die("channel", strerror(errno));
  for (;;) {
    struct epoll_event events[64];
    int n = epoll_wait(A.epoll, events, 64, tasks && look() ? LOOK_MS : -1);
    for (int i = 0; i < n; i++) {
      struct source *src = events[i].data.ptr;
      if (src->fd >= 0 && src->events) src->on(src, events[i].events);
    }
    groups_dropped();
    loop_collect();
  }
}
