// See machine.h.
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "mux.h"
#include "util.h"

#define ASK_MS 100                     // a question about usage: what is known is told when the guest is slow
#define FREEZE_MS 20000                // all that the guest has not written yet goes to the disk
#define NUMBERS_MOST 0x7fffff00u

struct process {                       // in the guest
  struct process *next;
  uint32_t id;                         // the first of its flows
  int status, end;                     // pipes: how it started, how it ended
  int inner;
  uint8_t ended, file, adopted;
  struct ending how;
};
static struct process *processes;
static uint32_t number;
static struct { int rows, cols; } terminal;             // of the one that is being made
static struct usage known;
static int disk_full, shell_replaced, frozen, over;
static struct { uint32_t id; int done; struct fault fault; } question;
static uint32_t asked;                 // STAT under way

// what the guest says ------------------------------------------------------------------------------------------------------------------

// The codes that may come out of a guest: text of a frame does not outlive it, and a hostile one invents none.
static const char *code_of(const char *text) {
  static const char *const codes[] = {"cwd_not_found", "permission_denied", "binary_not_found", "not_executable", "user_not_found", "pids_limit",
                                      "sandbox_damaged", "no_memory", "resource_exhausted", "invalid_request", "layer_invalid", "layer_not_found"};
  for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
    if (text && !strcmp(text, codes[i])) return codes[i];
  return "internal";
}

struct said { const char *code, *message; uint64_t err, pid, state, status, cpu, peak; };

static void status_field(const struct item *i) {
  static const struct { uint16_t tag; size_t at; } numbers[] = {
    {T_MEMORY_USED, offsetof(struct usage, memory)}, {T_SWAP_USED, offsetof(struct usage, swap)}, {T_MEMORY_PEAK, offsetof(struct usage, memory_peak)},
    {T_CPU_USED_NS, offsetof(struct usage, cpu_ns)}, {T_PIDS_USED, offsetof(struct usage, pids)}, {T_DISK_USED, offsetof(struct usage, disk)},
    {T_OOM_KILLS, offsetof(struct usage, oom_kills)}, {T_PIDS_HITS, offsetof(struct usage, pids_hits)}};
  uint64_t v;
  if (field_u64(i, &v)) return;
  for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
    if (numbers[n].tag == i->tag) *(uint64_t *)(void *)((char *)&known + numbers[n].at) = v;
  if (i->tag == T_DISK_FULL) disk_full = v != 0;
  if (i->tag == T_SHELL) shell_replaced |= v != 0;       // it stays replaced
}

static void hear(struct said *s, const uint8_t *payload, size_t size, int status) {
  struct cursor c = {payload, payload + size};
  struct item i;
  *s = (struct said){0};
  while (field_next(&c, &i) > 0) switch (i.tag) {
    case T_CODE: (void)field_text(&i, &s->code); break;
    case T_MESSAGE: (void)field_text(&i, &s->message); break;
    case T_ERRNO: (void)field_u64(&i, &s->err); break;
    case T_PID: (void)field_u64(&i, &s->pid); break;
    case T_STATE: (void)field_u64(&i, &s->state); break;
    case T_SIGNAL: (void)field_u64(&i, &s->status); break;
    default: if (status) status_field(&i);
      else if (i.tag == T_CPU_USED_NS) (void)field_u64(&i, &s->cpu);
      else if (i.tag == T_MEMORY_PEAK) (void)field_u64(&i, &s->peak);
  }
}

static struct fault fault_of(const struct said *s) {
  struct fault f = {.code = code_of(s->code), .err = (int)s->err};
  snprintf(f.message, sizeof f.message, "%s", s->message ? s->message : "the guest gave no message");
  return f;
}

void machine_refusal(const uint8_t *payload, size_t size, struct fault *f) {
  struct said s;
  hear(&s, payload, size, 0);
  *f = fault_of(&s);
}

// processes ----------------------------------------------------------------------------------------------------------------------------

static struct process *find(uint32_t id) {
  struct process *p = processes;
  while (p && p->id != id) p = p->next;
  return p;
}

static void forget(struct process *p) {
  for (struct process **at = &processes; *at; at = &(*at)->next)
    if (*at == p) { *at = p->next; break; }
  close_fd(&p->status);
  close_fd(&p->end);
  free(p);
}

// Its end is told when all that it wrote before is where its readers find it.
static void tell_end(struct process *p) {
  if (!p->ended || flow_owes(p->id + FLOW_OUT) || flow_owes(p->id + FLOW_ERR)) return;
  flow_end(p->id + FLOW_IN);
  if (p->end >= 0) (void)!write(p->end, &p->how, sizeof p->how);
  forget(p);
}

static void told(uint32_t flow) {
  struct process *p = find(flow - flow % FLOWS_EACH);
  if (!p) return;
  if (!p->file) { tell_end(p); return; }
  if (flow % FLOWS_EACH != FLOW_OUT) return;
  struct flow *w = flow_find(flow);
  if (w) { w->watched = 1; return; }   // so far its reader has all of it; more may come
  flow_end(p->id + FLOW_IN);           // the operation's answer is complete
  forget(p);
}

static void frame(uint8_t type, uint32_t id, const uint8_t *payload, size_t size) {
  struct process *p = find(id);
  struct said s;
  hear(&s, payload, size, type == H_STATUS);
  switch (type) {
    case H_STARTED:
      if (!p || (p->status < 0 && !p->adopted)) return;
      p->adopted = 0;
      p->inner = (int)s.pid;
      close_fd(&p->status);            // which says that it runs
      return;
    case H_FAILED: {
      if (!p) return;
      if (p->adopted) {                // it ended before it could be taken over
        p->ended = 1;
        p->how = (struct ending){CLD_KILLED, SIGKILL, 0, 0};
        for (uint32_t i = 0; i < FLOWS_EACH; i++) flow_end(id + i);
        tell_end(p);
        return;
      }
      struct fault f = fault_of(&s);
      if (p->status >= 0) (void)!write(p->status, &f, sizeof f);
      for (int i = 0; i < FLOWS_EACH; i++) flow_end(id + (uint32_t)i);
      if ((p = find(id))) forget(p);
      return;
    }
    case H_EXIT:
      if (!p || p->ended) return;
      close_fd(&p->status);
      p->ended = 1;
      p->how = (struct ending){(int)s.state, (int)s.status, s.cpu, s.peak};
      tell_end(p);
      return;
    case H_STATUS:
      if (id == asked) asked = 0;
      if (!over) counters_read();
      return;
    case H_DONE:
      if (id != question.id) return;
      question.done = 1;
      question.fault = s.code ? fault_of(&s) : (struct fault){0};
      return;
    case H_GONE:
      if (!over) init_died();
      return;
    default: return;                   // of a newer hand
  }
}

static void lost(const char *why) {
  char text[160];
  if (over) return;
  over = 1;
  snprintf(text, sizeof text, "the channel to the guest broke: %s", why);
  sandbox_end("infra_lost", text, NULL, 0);
}

static const struct mux_user user = {frame, told, lost, NULL};

void machine_open(struct sandbox *s) {
  mux_user = &user;
  if (mux_open(s->channel)) { fprintf(stderr, "aether %s: prepare the channel: %s\n", s->spec.id, strerror(errno)); abort(); }
}

// The guest is dead, and with it everything in it. What it had sent still counts.
void machine_end(void) {
  over = 1;
  for (int i = 0; i < 10000 && mux_wait(0); i++) {}
  for (struct process *p = processes, *next; p; p = next) {
    next = p->next;
    if (!p->ended) p->how = (struct ending){CLD_KILLED, SIGKILL, 0, 0};
    if (p->end >= 0) (void)!write(p->end, &p->how, sizeof p->how);
    for (uint32_t i = FLOW_OUT; i <= FLOW_ERR; i++) flow_end(p->id + i);
  }
}

// running something --------------------------------------------------------------------------------------------------------------------

static uint32_t next_number(void) {
  number = number >= NUMBERS_MOST ? FLOWS_EACH : number + FLOWS_EACH;
  return number;
}

static struct process *process_new(struct fault *f, int *status, int *end) {
  int a[2] = {-1, -1}, b[2] = {-1, -1};
  struct process *p = calloc(1, sizeof *p);
  if (!p || pipe2(a, O_CLOEXEC) || pipe2(b, O_CLOEXEC | O_NONBLOCK)) {
    fault_host(f, p ? errno : ENOMEM, "make a pipe");
    close_fd(&a[0]);
    close_fd(&a[1]);
    free(p);
    return NULL;
  }
  *p = (struct process){.next = processes, .id = next_number(), .status = a[1], .end = b[1]};
  processes = p;
  *status = a[0];
  *end = b[0];
  return p;
}

static int copy(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 3); }

int machine_enter(struct sandbox *s, const struct entry *x, struct start *st, struct fault *f) {
  *f = (struct fault){0};
  *st = (struct start){.pidfd = -1, .status = -1, .slot = MACHINE_SLOT};
  if (x->run) return fault_set(f, "unsupported", 0, "sandbox %s is a microVM, in which code of its supervisor does not run", s->spec.id);
  struct buf b = mux_buf();
  struct process *p = process_new(f, &st->status, &st->pidfd);
  if (!p) return -1;
  uint64_t flags = (x->in >= 0 ? X_STDIN : 0) | (x->tty ? X_PTY : 0) | (x->err == x->out ? X_MERGE : 0);
  frame_begin(&b, H_SPAWN, 0, p->id);
  for (const char *const *arg = x->argv; arg && !x->shell_text && *arg; arg++) frame_text(&b, T_ARG, *arg);
  for (const char *const *env = x->env; env && *env; env++) frame_text(&b, T_ENV, *env);
  for (int i = 0; i < s->spec.nenv; i++) frame_text(&b, T_ENV, s->spec.env[i]); // the first of a name wins
  if (x->shell_text) frame_text(&b, T_SHELL, x->shell_text);
  if (x->cwd) frame_text(&b, T_CWD, x->cwd);
  if (x->user) frame_text(&b, T_USER, x->user);
  frame_text(&b, T_CGROUP, x->group);
  frame_u64(&b, T_EXEC_FLAGS, flags);
  if (x->tty) {
    frame_u64(&b, T_ROWS, (uint64_t)terminal.rows);
    frame_u64(&b, T_COLS, (uint64_t)terminal.cols);
  }
  int bad = !frame_end(&b) ? fault_set(f, "invalid_request", E2BIG, "start a program") : 0;
  if (!bad) mux_send(&b);
  // the guest's end of each is there before anything of them can come or go
  if (!bad && ((x->in >= 0 && flow_send(p->id + FLOW_IN, copy(x->in))) || flow_receive(p->id + FLOW_OUT, copy(x->out)) ||
               (!(flags & X_MERGE) && flow_receive(p->id + FLOW_ERR, copy(x->err)))))
    bad = fault_host(f, errno, "connect the streams of a program");
  st->pid = (pid_t)p->id;
  if (!bad) return 0;
  machine_abandon(st);
  close_fd(&st->status);
  return -1;
}

int machine_started(struct start *st, pid_t *pid, int *pidfd, struct fault *f) {
  struct fault said;
  ssize_t n;
  do n = read(st->status, &said, sizeof said); while (n < 0 && errno == EINTR);
  if (!n) {
    *pid = st->pid;
    *pidfd = st->pidfd;
    return 0;
  }
  close_fd(&st->pidfd);
  if (n == (ssize_t)sizeof said) *f = said;
  else fault_set(f, "internal", errno, "hear how a program started");
  return -1;
}

static void about(uint8_t type, uint32_t process, const char *group, int signal) {
  struct buf b = mux_buf();
  frame_begin(&b, type, 0, process);
  if (group) frame_text(&b, T_CGROUP, group);
  if (signal) frame_u64(&b, T_SIGNAL, (uint64_t)signal);
  mux_send(&b);
}

void machine_abandon(struct start *st) {
  struct process *p = find((uint32_t)st->pid);
  about(H_KILL, (uint32_t)st->pid, NULL, 0);
  for (uint32_t i = 0; i < FLOWS_EACH; i++) flow_end((uint32_t)st->pid + i);
  if (p) forget(p);
  close_fd(&st->pidfd);
}

int machine_ended(int pidfd, struct ending *e) {
  ssize_t n;
  do n = read(pidfd, e, sizeof *e); while (n < 0 && errno == EINTR);
  return n == (ssize_t)sizeof *e;
}

int machine_pid(pid_t process) {
  struct process *p = find((uint32_t)process);
  return p ? p->inner : 0;
}

void machine_signal(pid_t process, int signal) { about(H_SIGNAL, (uint32_t)process, NULL, signal); }

void machine_group(const char *group, int signal) { about(signal ? H_SIGNAL : H_KILL, 0, group, signal); }

void machine_kill(pid_t process) { about(H_KILL, (uint32_t)process, NULL, 0); }

void machine_drop(const char *group) { about(H_DROP, 0, group, 0); }

// The terminal is in the guest; here it is a pair of sockets.
int machine_terminal(int rows, int cols, int *slave, struct fault *f) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) { *slave = -1; return fault_host(f, errno, "make a terminal"); }
  terminal.rows = rows;
  terminal.cols = cols;
  *slave = ends[1];
  return ends[0];
}

void machine_resize(pid_t process, int rows, int cols) {
  struct buf b = mux_buf();
  frame_begin(&b, H_RESIZE, 0, (uint32_t)process);
  frame_u64(&b, T_ROWS, (uint64_t)rows);
  frame_u64(&b, T_COLS, (uint64_t)cols);
  mux_send(&b);
}

pid_t machine_file(int conn, uint32_t request, const uint8_t *payload, size_t size, int *end, struct fault *f) {
  int status = -1;
  *f = (struct fault){0};
  struct process *p = process_new(f, &status, end);
  close_fd(&status);
  if (!p) return -1;
  uint32_t id = p->id;
  p->file = 1;
  close_fd(&p->status);
  struct buf b = mux_buf();
  frame_begin(&b, H_FILE, 0, id);
  frame_u64(&b, T_OFFSET, request);    // the number that its answers carry
  frame_raw(&b, payload, size);
  if (!frame_end(&b)) fault_set(f, "invalid_request", E2BIG, "a file operation");
  else {
    mux_send(&b);
    if (flow_send(id + FLOW_IN, copy(conn)) || flow_receive(id + FLOW_OUT, copy(conn))) fault_host(f, errno, "connect a file operation");
  }
  if (!f->code) {
    struct flow *answers = flow_find(id + FLOW_OUT);
    answers->watched = 1;
    return (pid_t)id;
  }
  for (uint32_t i = 0; i < FLOWS_EACH; i++) flow_end(id + i);
  about(H_KILL, id, NULL, 0);
  forget(p);
  close_fd(end);
  return -1;
}

// questions ----------------------------------------------------------------------------------------------------------------------------

static uint64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int ask(struct buf *b, int ms, struct fault *f) {
  question.done = 0;
  mux_send(b);
  for (uint64_t until = now_ms() + (uint64_t)ms, now; !question.done && !over && (now = now_ms()) < until;) mux_wait((int)(until - now));
  if (!question.done) return fault_set(f, "unavailable", 0, "the guest of %s did not answer within %d ms", A.s->spec.id, ms);
  if (!question.fault.code) return 0;
  *f = question.fault;
  return -1;
}

static struct buf begin(uint8_t type) {
  struct buf b = mux_buf();
  question.id = next_number();
  frame_begin(&b, type, 0, question.id);
  return b;
}

int machine_rename(const char *hostname, struct fault *f) {
  struct buf b = begin(H_RENAME);
  frame_text(&b, T_HOSTNAME, hostname);
  return ask(&b, 5000, f);
}

int machine_hold(struct fault *f) {
  if (frozen) return fault_set(f, "unavailable", 0, "the files of sandbox %s are being copied", A.s->spec.id);
  struct buf b = begin(H_HOLD);
  frozen = 1;
  if (!ask(&b, FREEZE_MS, f)) {
    mux_quiet(1);
    return 0;
  }
  machine_thaw();
  return -1;
}

int machine_adopt(uint32_t process, int *end, struct fault *f) {
  int status = -1;
  struct process *p = process_new(f, &status, end);
  if (!p) return -1;
  close_fd(&status);
  close_fd(&p->status);
  p->id = process;
  p->adopted = 1;
  if (number < process) number = process;
  about(H_ADOPT, process, NULL, 0);
  return 0;
}

void machine_streams(uint32_t process, int in, int out, int err, struct fault *f) {
  if ((in >= 0 && flow_send(process + FLOW_IN, in)) || (out >= 0 && flow_receive(process + FLOW_OUT, out)) || (err >= 0 && flow_receive(process + FLOW_ERR, err)))
    fault_host(f, errno, "connect the streams of a program");
}

int machine_freeze(struct fault *f) {
  if (frozen) return 0;
  struct buf b = begin(H_FREEZE);
  frozen = 1;
  if (!ask(&b, FREEZE_MS, f)) return 0;
  machine_thaw();
  return -1;
}

void machine_thaw(void) {
  if (!frozen) return;
  frozen = 0;
  mux_quiet(0);
  about(H_THAW, 0, NULL, 0);
}

// A guest that stands still cannot be asked.
void machine_usage(struct usage *u) {
  if (!A.paused && !over && !asked) {
    machine_look();
    for (uint64_t until = now_ms() + ASK_MS, now; asked && !over && (now = now_ms()) < until;) mux_wait((int)(until - now));
  }
  *u = known;
}

const struct usage *machine_known(void) { return &known; }
void machine_look(void) {
  if (!A.paused && !over && !asked) about(H_STAT, asked = next_number(), NULL, 0);
}

int machine_disk_full(void) { return disk_full; }
int machine_shell_replaced(void) { return shell_replaced; }
