// Commands: from the process's start to the exit record. The record appears only when the output before it can be read.
#include "aether.h"
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "util.h"

#define OOM_NS (1000 * MS)             // an OOM kill at most this long before a death by SIGKILL explains it
#define DISK_LOOK_NS (50 * MS)         // how often we look for a command that shall stop when the disk is full
#define BUCKETS 1024
#ifndef P_PIDFD
#define P_PIDFD 3
#endif

static struct command *buckets[BUCKETS];
static struct command *left_first, **left_end = &left_first;
static int left_pipes;
static int unsaved;                    // records that the disk refused; kept in memory

// the table --------------------------------------------------------------------------------------------------------------------------

static struct command **bucket(const char *id) {
  uint32_t h = 2166136261u;
  for (int i = 0; i < ID_SIZE && id[i]; i++) h = (h ^ (uint8_t)id[i]) * 16777619u;
  return &buckets[(h ^ h >> 13) & (BUCKETS - 1)];
}

struct command *command_live(const char *id) {
  for (struct command *cmd = *bucket(id); cmd; cmd = cmd->next_hash)
    if (!strncmp(cmd->rec.command, id, ID_SIZE)) return cmd;
  return NULL;
}

static struct command *add(const char *id) {
  struct command *cmd = calloc(1, sizeof *cmd);
  if (!cmd) return NULL;
  snprintf(cmd->rec.command, sizeof cmd->rec.command, "%s", id);
  cmd->refs = 1;
  cmd->status.fd = cmd->process.fd = cmd->in.fd = -1;
  cmd->log[0].fd = cmd->log[1].fd = -1;
  cmd->deadline = NEVER;
  struct command **b = bucket(id);
  cmd->next_hash = *b;
  *b = cmd;
  cmd->next = A.live;
  if (A.live) A.live->prev = cmd;
  A.live = cmd;
  return cmd;
}

struct command *command_new(const char *id, uint64_t definition) {
  struct command *cmd = add(id);
  if (!cmd) return NULL;
  cmd->definition = definition;
  cmd->rec.reserved[0] = (uint32_t)definition;
  cmd->rec.reserved[1] = (uint32_t)(definition >> 32);
  cmd->rec.code = -1;
  cmd->rec.memory_limit = A.s->spec.memory_bytes;
  cmd->rec.start_ns = A.real;
  cmd->state = C_QUEUED;
  A.running++;
  return cmd;
}

struct command *command_find(const char *id) {
  if (!id_valid(id)) return NULL;
  struct command *cmd = command_live(id);
  if (cmd) { cmd->refs++; return cmd; }
  if (!(cmd = add(id))) return NULL;
  if (records_load(id, &cmd->rec, &cmd->log[0], &cmd->log[1])) { command_unref(cmd); return NULL; }
  cmd->state = C_ENDED;
  cmd->saved = 1;
  cmd->definition = cmd->rec.reserved[0] | (uint64_t)cmd->rec.reserved[1] << 32;
  return cmd;                          // its first reference is the caller's
}

void command_ref(struct command *cmd) { cmd->refs++; }

void command_unref(struct command *cmd) {
  if (--cmd->refs) return;
  log_close(&cmd->log[0]);
  log_close(&cmd->log[1]);
  struct command **b = bucket(cmd->rec.command);
  while (*b != cmd) b = &(*b)->next_hash;
  *b = cmd->next_hash;
  if (cmd->prev) cmd->prev->next = cmd->next;
  else A.live = cmd->next;
  if (cmd->next) cmd->next->prev = cmd->prev;
  free(cmd->text);
  loop_free(cmd);
}

void command_evicted(const char *id) {
  struct command *cmd = command_live(id);
  if (!cmd) return;
  log_evict(&cmd->log[0]);
  log_evict(&cmd->log[1]);
  cmd->rec.flags |= R_LOG_EVICTED;
}

int command_group(const struct command *cmd, char name[ID_SIZE + 4]) {
  snprintf(name, ID_SIZE + 4, "c.%.31s", cmd->rec.command);
  return cmd->group;
}

int command_pid(const struct command *cmd) {
  char path[40], text[2048];
  if (A.s->channel > 0 && cmd->pid > 0 && cmd->state == C_RUNNING) return machine_pid(cmd->pid);
  if (cmd->pid <= 0 || cmd->state != C_RUNNING || exec_starting(cmd)) return (int)cmd->rec.pid;
  snprintf(path, sizeof path, "/proc/%d/status", cmd->pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  char *line = strstr(text, "\nNSpid:"), *end = line ? strchr(line + 1, '\n') : NULL;
  if (!end) return 0;
  *end = 0;
  char *last = strrchr(line + 1, '\t');
  return last ? atoi(last + 1) : 0;
}

// start ------------------------------------------------------------------------------------------------------------------------------

void command_begin(struct command *cmd) {
  refresh();
  cmd->state = C_RUNNING;
  cmd->started = A.now;
  cmd->rec.start_ns = A.real;
  cmd->deadline = cmd->timeout_ns ? A.now + cmd->timeout_ns : NEVER;
  if (cmd->deadline < A.now) cmd->deadline = NEVER;      // overflow: for ever
  counters_read();
  cmd->oom_before = A.oom_kills;
  cmd->pids_before = A.pids_hits;
  if (cmd->deadline != NEVER) timer_want(cmd->deadline);
  if (cmd->stop & X_STOP_AT_DISK) timer_want(A.now + DISK_LOOK_NS);
}

void command_started(struct conn *c, uint32_t request, struct command *cmd) {
  struct buf b = reply_buf();
  frame_begin(&b, F_STARTED, 0, request);
  frame_text(&b, T_COMMAND, cmd->rec.command);
  frame_u64(&b, T_PID, (uint64_t)command_pid(cmd));
  frame_u64(&b, T_TIME_NS, cmd->rec.start_ns);
  conn_reply(c, &b);
}

// end --------------------------------------------------------------------------------------------------------------------------------

void command_kill(struct command *cmd, int verdict) {
  char name[ID_SIZE + 4];
  switch (cmd->state) {
    case C_QUEUED:
      cmd->verdict = (uint8_t)verdict;
      cmd->forced = 1;
      command_status(cmd, CLD_KILLED, SIGKILL, 0, 0);
      break;
    case C_RUNNING:
      if (!cmd->verdict) cmd->verdict = (uint8_t)verdict;
      if (cmd->session) session_kill(cmd, verdict);
      else if (command_group(cmd, name)) {
        group_kill(name);
        cmd->traced = A.now + TRACED_NS;                 // should it not die of that
        timer_want(cmd->traced);
      }
      break;
    default:                           // its process has ended: whatever it left behind
      if (command_group(cmd, name)) group_kill(name);
  }
}

void command_status(struct command *cmd, int code, int status, uint64_t cpu_ns, uint64_t peak) {
  struct record *r = &cmd->rec;
  int exited = code == CLD_EXITED;
  r->cpu_ns = cpu_ns;
  r->memory_peak = peak;
  r->code = exited ? status : -1;
  r->signal = exited ? 0 : status;
  counters_read();
  if (cmd->verdict && (cmd->forced || (!exited && status == SIGKILL))) {
    r->ending = cmd->verdict;
    r->code = -1;
  } else if (!exited && status == SIGKILL && A.oom_kills > cmd->oom_before && A.now - A.oom_at <= OOM_NS) {
    struct usage u = {0};
    sandbox_usage(A.s, &u);
    r->ending = END_OOM;
    r->memory_peak = u.memory_peak;
  } else r->ending = exited ? END_EXITED : END_SIGNALED;
  if (r->ending == END_KILLED) r->flags |= cmd->ended_by;
  cmd->state = C_DRAINING;
  cmd->grace = A.now + GRACE_NS;
  for (int i = 0; i < 2; i++) {
    struct channel *ch = channel_of(cmd, i);
    if (ch) channel_owe(ch);
  }
  command_drain(cmd);
}

static void on_process(struct source *src, uint32_t events) {
  (void)events;
  struct command *cmd = OWNER(src, struct command, process);
  siginfo_t info = {0};
  struct rusage u = {0};
  if (A.s->channel > 0) {
    struct ending e;
    if (!machine_ended(src->fd, &e)) return;
    loop_close(src);
    command_status(cmd, e.code, e.status, e.cpu_ns, e.peak);
    return;
  }
  if (syscall(SYS_waitid, P_PIDFD, src->fd, &info, WEXITED | WNOHANG, &u)) {
    if (errno == EINTR) return;
    cmd->verdict = END_LOST;           // nobody else reaps our children; if it happens we say that we do not know
    cmd->forced = 1;
  } else if (!info.si_pid) {           // a tracer inside holds it
    if (cmd->traced) tracers_kill(cmd->pid);
    cmd->traced = A.now + TRACED_NS;
    timer_want(cmd->traced);
    loop_want(src, 0);
    return;
  }
  loop_close(src);
  if (info.si_code != CLD_EXITED && info.si_status == SIGKILL && !cmd->verdict && !A.ending && init_dying()) {
    cmd->verdict = END_LOST;
    cmd->state = C_RUNNING;
    init_died();
  }
  uint64_t cpu = ((uint64_t)u.ru_utime.tv_sec + (uint64_t)u.ru_stime.tv_sec) * 1000000000ull +
                 ((uint64_t)u.ru_utime.tv_usec + (uint64_t)u.ru_stime.tv_usec) * 1000ull;
  command_status(cmd, info.si_code, info.si_status, cpu, (uint64_t)u.ru_maxrss * 1024);
}

void command_watch(struct command *cmd, int pidfd) {
  cmd->process = (struct source){.on = on_process, .fd = pidfd};
  loop_want(&cmd->process, EPOLLIN);
}

void command_drain(struct command *cmd) {
  if (cmd->state != C_DRAINING || cmd->draining) return;
  int open = 0, owed = 0;
  cmd->draining = 1;
  for (int i = 0; i < 2; i++) {
    struct channel *ch = channel_of(cmd, i);
    if (!ch) continue;
    channel_drain(ch);
    if (!(ch = channel_of(cmd, i))) continue;
    if (ch->owed) owed = 1;
    if (cmd->chan[i]) open = 1;        // a session's own pipes stay open and say nothing
  }
  cmd->draining = 0;
  if (owed && !A.ending) return;       // its stream's reader is slow; what is read then brings us here again
  if (open && A.now < cmd->grace && !A.ending) { timer_want(cmd->grace); return; }
  command_finish(cmd);
}

static void keep_unsaved(struct command *cmd) {
  fprintf(stderr, "aether %s: write the record of %s: %s\n", A.s->spec.id, cmd->rec.command, strerror(errno));
  event("state_disk", cmd->rec.command, "the node's disk refused an exit record; it is kept in memory");
  if (unsaved >= 1000) return;         // beyond it a record lives as long as somebody waits for it
  unsaved++;
  command_ref(cmd);                    // for the life of the sandbox
}

static int pipes_open(const struct command *cmd) { return (cmd->chan[0] != NULL) + (cmd->chan[1] != NULL); }

static void leave_pipes(struct command *cmd) {
  cmd->left = 1;
  cmd->rec.flags |= R_PIPES_LEFT;
  cmd->next_left = NULL;
  *left_end = cmd;
  left_end = &cmd->next_left;
  left_pipes += pipes_open(cmd);
  while (left_pipes > MAX_LEFT) {
    struct command *oldest = left_first;
    for (int i = 0; i < 2; i++)
      if (oldest->chan[i]) channel_close(oldest->chan[i]);
    command_settle(oldest);
  }
}

void command_finish(struct command *cmd) {
  struct record *r = &cmd->rec;
  stdin_close(cmd);
  r->end_ns = A.real;
  if (A.oom_kills > cmd->oom_before || r->ending == END_OOM) r->limits |= LIMIT_MEMORY;
  if (A.pids_hits > cmd->pids_before) r->limits |= LIMIT_PIDS;
  if (cmd->disk_seen || (!A.ending && cmd->started && sandbox_disk_full(A.s))) r->limits |= LIMIT_DISK;
  for (int i = 0; i < 2; i++)
    if (cmd->log[i].total > log_kept(&cmd->log[i])) r->limits |= LIMIT_OUTPUT;
  if (cmd->shell && !A.ending && cmd->started && sandbox_shell_replaced(A.s)) {
    r->flags |= R_SHELL_REPLACED;
    if (!A.damaged) {
      A.damaged = 1;
      event("health", r->command, "the shell of the sandbox was replaced");
    }
  }
  cmd->state = C_ENDED;
  if (pipes_open(cmd)) leave_pipes(cmd);
  if (records_append(r, &cmd->log[0], &cmd->log[1])) keep_unsaved(cmd);
  else cmd->saved = 1;
  A.running--;
  touch();
  idle_again();
  subs_wake(cmd);
  if (cmd->session) session_done(cmd); // which keeps it until its next command, for what comes between
  else if (!pipes_open(cmd)) command_settle(cmd);
}

void command_settle(struct command *cmd) {
  if (pipes_open(cmd)) { left_pipes--; return; }
  if (cmd->left) {
    struct command **p = &left_first;
    int n = 0;
    while (*p != cmd) p = &(*p)->next_left;
    *p = cmd->next_left;
    for (p = &left_first; *p; p = &(*p)->next_left) n += pipes_open(*p);
    left_end = p;
    left_pipes = n;
    cmd->left = 0;
  }
  struct record *r = &cmd->rec;
  if (cmd->saved && (cmd->log[0].total != r->out_total || cmd->log[1].total != r->err_total)) {
    for (int i = 0; i < 2; i++)        // the record keeps its inline bytes; what is longer now needs a file
      if (cmd->log[i].total != (i ? r->err_total : r->out_total)) log_spill(&cmd->log[i]);
    r->out_total = cmd->log[0].total; r->out_dropped = r->out_total - log_kept(&cmd->log[0]);
    r->err_total = cmd->log[1].total; r->err_dropped = r->err_total - log_kept(&cmd->log[1]);
    records_update(r);
  }
  char name[ID_SIZE + 4];
  if (command_group(cmd, name)) group_drop(name);
  cmd->group = 0;
  command_unref(cmd);
}

void command_discard(struct command *cmd) {
  char name[ID_SIZE + 4];
  for (int i = 0; i < 2; i++)
    if (cmd->chan[i]) channel_close(cmd->chan[i]);
  stdin_close(cmd);
  if (command_group(cmd, name)) group_drop(name);
  A.running--;
  command_unref(cmd);
}

// time -------------------------------------------------------------------------------------------------------------------------------

uint64_t commands_tick(void) {
  uint64_t next = NEVER;
  int disk = -1;
  for (struct command *cmd = A.live, *after; cmd; cmd = after) {
    after = cmd->next;
    if (cmd->state == C_DRAINING) {
      uint64_t due = cmd->grace > A.now ? cmd->grace : NEVER;
      if (due == NEVER) command_drain(cmd);
      else if (due < next) next = due;
    }
    if (cmd->state != C_RUNNING) continue;
    if (exec_starting(cmd)) {
      exec_tick(cmd);
      if (A.now + START_LOOK_MS * MS < next) next = A.now + START_LOOK_MS * MS;
      if (cmd->state != C_RUNNING || !exec_starting(cmd)) continue;
    }
    if (cmd->traced && cmd->process.fd >= 0) {
      if (A.now >= cmd->traced) on_process(&cmd->process, 0);
      if (cmd->state != C_RUNNING) continue;
      if (cmd->traced < next) next = cmd->traced;
    }
    if (cmd->deadline != NEVER && !A.paused) {
      if (A.now >= cmd->deadline) {
        cmd->deadline = A.now + 1000 * MS;               // and again, should a kill have come to nothing
        command_kill(cmd, END_TIMEOUT);
      }
      if (cmd->deadline < next) next = cmd->deadline;
    }
    if (cmd->stop & X_STOP_AT_DISK && !cmd->verdict) {
      if (disk < 0 && A.s->channel > 0) machine_look();  // for the next time
      if (disk < 0) disk = sandbox_disk_full(A.s) > 0;
      if (disk) { cmd->disk_seen = 1; command_kill(cmd, END_DISK_FULL); }
      if (A.now + DISK_LOOK_NS < next) next = A.now + DISK_LOOK_NS;
    }
  }
  return next;
}

void commands_shift(uint64_t by) {
  for (struct command *cmd = A.live; cmd; cmd = cmd->next)
    if (cmd->state == C_RUNNING && cmd->deadline != NEVER) cmd->deadline += by;
}

// One that goes on elsewhere has no end that anybody hears of.
static void reap(struct command *cmd, uint64_t until) {
  siginfo_t info = {0};
  do {
    if (syscall(SYS_waitid, P_PIDFD, cmd->process.fd, &info, WEXITED | WNOHANG, NULL) || info.si_pid) break;
    nap_us(500);
    refresh();
  } while (A.now < until);
  loop_close(&cmd->process);
}

// The sandbox is dead. What runs is reaped (5 s for all is far more than a killed process needs), then everything is recorded.
void commands_end(int lost) {
  uint64_t until = A.now + 5000 * MS;
  for (struct command *cmd = A.live; cmd; cmd = cmd->next) {
    if (exec_starting(cmd)) exec_end(cmd);
    if (cmd->state == C_QUEUED || cmd->state == C_RUNNING) {
      if (!cmd->verdict) {
        cmd->verdict = lost ? END_LOST : END_KILLED;
        cmd->ended_by = (uint8_t)A.leaving;
      }
      cmd->forced = cmd->session || cmd->state == C_QUEUED || cmd->process.fd < 0;
    }
  }
  for (int again = 1; again;) {
    again = 0;
    for (struct command *cmd = A.live; cmd && !again; cmd = cmd->next) {
      if (cmd->state == C_ENDED || (cmd->kept && cmd->process.fd < 0)) continue;
      again = 1;
      if (cmd->kept) { reap(cmd, until); continue; }
      if (cmd->state == C_RUNNING && cmd->process.fd >= 0) {
        for (;; nap_us(1000)) {        // a tracer inside holds it until it has died itself
          refresh();
          struct pollfd p = {.fd = cmd->process.fd, .events = POLLIN};
          int wait_ms = until > A.now ? (int)((until - A.now) / MS) + 1 : 0;
          if (poll(&p, 1, wait_ms) > 0) on_process(&cmd->process, POLLIN);
          if (cmd->state != C_RUNNING || A.now >= until) break;
        }
        if (cmd->state != C_RUNNING) continue;
        loop_close(&cmd->process);
        cmd->verdict = END_LOST;
        cmd->forced = 1;
      }
      if (cmd->state == C_DRAINING) command_drain(cmd);
      else command_status(cmd, CLD_KILLED, SIGKILL, 0, 0);
    }
  }
  while (left_first) {
    struct command *cmd = left_first;
    for (int i = 0; i < 2; i++)
      if (cmd->chan[i]) channel_drain(cmd->chan[i]);
    for (int i = 0; i < 2; i++)
      if (cmd->chan[i]) channel_close(cmd->chan[i]);
    command_settle(cmd);
  }
}
