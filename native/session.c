// chronus: named shells. A session is one long-lived shell that reads a script from a pipe of ours. Each command becomes
//
//     command eval '<text>' </dev/null 9>&-
//     command printf '<nonce> %d\n' "$?" >&9
//
// so that a quote or here-document that does not end is an error of its own eval and never swallows the next command, stdin is empty, and
// what the command starts has no control pipe. The nonce on the control pipe tells that it ended; everything it wrote is in the output
// pipes by then. A command that forges the nonce changes the exit status of that command of its own session, and nothing else.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONTROL 9                      // its descriptor in the shell
#define RETRY_NS (20 * MS)             // how often the processes of a timed out command are killed until the shell is back
#define MAX_BEFORE 4096                // processes of earlier commands that a timeout spares
#ifndef P_PIDFD
#define P_PIDFD 3
#endif

struct session {
  struct session *next;
  char name[ID_SIZE];
  char *cwd, *user, **env;             // as it was opened: a lost shell is opened again so
  struct source shell, control, script;// pidfd; read end; write end
  struct channel *chan[2];
  pid_t pid;
  unsigned serial;                     // of its shell, which names its cgroup: a closed session's processes may outlive its name
  int group, killed, closing;          // group: it has a cgroup; killed: by us; closing: the name goes with the shell
  struct command *current, *last, *queue;  // runs; ended, and takes what comes between; wait
  char *pending;                       // script that the pipe did not take yet
  size_t pending_at, pending_size;
  char nonce[33], said[128];           // said: unfinished control line
  size_t said_n;
  int32_t *before;                     // processes that were there when the command began, the shell included
  size_t nbefore;
  uint64_t kill_at, lost_at;           // 0: no kill under way
  uint64_t traced;                     // as of a command
};

static struct session *sessions;
static unsigned serials;
static void next(struct session *z);

struct session *session_find(const char *name) {
  for (struct session *z = sessions; z; z = z->next)
    if (!strcmp(z->name, name) && !z->closing) return z;
  return NULL;
}

struct channel *session_channel(struct session *z, int which) { return z->chan[which]; }

int session_at(size_t i, const char **name, int *busy) {
  for (struct session *z = sessions; z; z = z->next) {
    if (z->closing || i--) continue;
    *name = z->name;
    *busy = z->current != NULL;
    return 1;
  }
  return 0;
}

int32_t session_idle(size_t i) {
  for (struct session *z = sessions; z; z = z->next)
    if (!z->closing && !z->current && z->pid && !i--) return z->pid;
  return 0;
}

static const char *group_of(const struct session *z) {
  static char name[ID_SIZE + 4];
  snprintf(name, sizeof name, "s.%u", z->serial);
  return name;
}

// the shell --------------------------------------------------------------------------------------------------------------------------

static void release_last(struct session *z) {
  struct command *cmd = z->last;
  if (!cmd) return;
  z->last = NULL;
  for (int i = 0; i < 2; i++)
    if (z->chan[i] && z->chan[i]->cmd == cmd) z->chan[i]->cmd = NULL;
  cmd->session = NULL;
  command_settle(cmd);
}

static void drop_pending(struct session *z) {
  free(z->pending);
  z->pending = NULL;
  z->pending_at = z->pending_size = 0;
}

static void free_session(struct session *z) {
  for (struct session **p = &sessions; *p; p = &(*p)->next)
    if (*p == z) { *p = z->next; break; }
  for (char **e = z->env; e && *e; e++) free(*e);
  free(z->env);
  free(z->cwd);
  free(z->user);
  free(z->before);
  drop_pending(z);
  loop_free(z);
}

static void finish_queue(struct session *z) {
  while (z->queue) {
    z->queue->rec.flags |= R_SESSION_LOST;
    command_kill(z->queue, END_KILLED);                  // takes itself out of the queue
  }
}

// The shell is gone, `code` and `status` as waitid tells. Its pipes go to the command that ran, which ends as any command does.
static void shell_gone(struct session *z, int code, int status) {
  struct command *cmd = z->current ? z->current : z->last;
  int ran = z->current != NULL, exited = code == CLD_EXITED;
  loop_close(&z->shell);
  loop_close(&z->control);
  loop_close(&z->script);
  drop_pending(z);
  z->pid = 0;
  z->kill_at = z->lost_at = z->traced = 0;
  z->current = z->last = NULL;
  for (int i = 0; i < 2; i++) {
    struct channel *ch = z->chan[i];
    z->chan[i] = NULL;
    if (!ch) continue;
    ch->session = NULL;
    if (cmd && ch->src.fd >= 0) { ch->cmd = cmd; cmd->chan[i] = ch; continue; }
    loop_close(&ch->src);
    loop_free(ch);
  }
  if (z->group) group_drop(group_of(z));
  z->group = 0;
  // `exit` closes the session; a shell that was killed is opened again at its next use
  if (exited && !z->killed && !(ran && cmd->verdict)) z->closing = 1;
  int lost = !z->closing;
  z->killed = 0;
  if (cmd) {
    cmd->session = NULL;
    if (!ran) {                        // it was recorded already; only what its processes still write can come
      for (int i = 0; i < 2; i++)
        if (cmd->chan[i]) channel_drain(cmd->chan[i]);
      for (int i = 0; i < 2; i++)
        if (cmd->chan[i]) channel_close(cmd->chan[i]);
      command_settle(cmd);
    } else {
      if (cmd->state == C_DRAINING) {  // the command itself had ended, its reader is slow
        command_drain(cmd);
      } else {
        if (lost) {
          cmd->rec.flags |= R_SESSION_LOST;
          event("session_lost", cmd->rec.command, z->name);
        }
        command_status(cmd, code, status, 0, 0);
      }
    }
  }
  if (!z->closing) { next(z); return; }
  finish_queue(z);
  free_session(z);
}

static void on_shell(struct source *src, uint32_t events) {
  (void)events;
  struct session *z = OWNER(src, struct session, shell);
  siginfo_t info = {0};
  if (syscall(SYS_waitid, P_PIDFD, src->fd, &info, WEXITED | WNOHANG, NULL)) {
    if (errno == EINTR) return;
    info.si_code = CLD_KILLED;
    info.si_status = SIGKILL;
  } else if (!info.si_pid) {           // a tracer inside holds it
    if (z->traced) tracers_kill(z->pid);
    z->traced = A.now + TRACED_NS;
    timer_want(z->traced);
    loop_want(src, 0);
    return;
  }
  loop_close(src);
  if (info.si_code != CLD_EXITED && info.si_status == SIGKILL && !z->killed && !A.ending && init_dying()) init_died();
  shell_gone(z, info.si_code, info.si_status);
}

static void ended(struct session *z, int status) {
  struct command *cmd = z->current;
  z->kill_at = z->lost_at = 0;
  if (cmd->state == C_RUNNING) command_status(cmd, CLD_EXITED, status, 0, 0);
}

static void on_control(struct source *src, uint32_t events) {
  (void)events;
  struct session *z = OWNER(src, struct session, control);
  ssize_t n = read(src->fd, z->said + z->said_n, sizeof z->said - 1 - z->said_n);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) { loop_want(src, 0); return; }             // closed: by `exec 9>&-`, or the shell is going; its pidfd or the timeout tells
  z->said_n += (size_t)n;
  z->said[z->said_n] = 0;
  char *p = z->said;
  for (char *line; (line = strchr(p, '\n')); p = line + 1) {
    *line = 0;
    int status;
    char nonce[33];
    if (z->current && sscanf(p, "%32s %d", nonce, &status) == 2 && !strcmp(nonce, z->nonce)) {
      z->nonce[0] = 0;
      ended(z, status & 255);
    }
    if (src->fd < 0) return;
  }
  z->said_n -= (size_t)(p - z->said);
  memmove(z->said, p, z->said_n);
  if (z->said_n == sizeof z->said - 1) z->said_n = 0;    // no line of ours is that long
}

static void push_script(struct session *z) {
  while (z->pending_at < z->pending_size) {
    ssize_t n = write(z->script.fd, z->pending + z->pending_at, z->pending_size - z->pending_at);
    if (n >= 0) { z->pending_at += (size_t)n; continue; }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) { loop_want(&z->script, EPOLLOUT); return; }
    break;                             // EPIPE: the shell is going, its pidfd tells
  }
  drop_pending(z);
  loop_want(&z->script, 0);
}

static void on_script(struct source *src, uint32_t events) { (void)events; push_script(OWNER(src, struct session, script)); }

static int pipe_fault(struct fault *f, const struct session *z) {
  *f = (struct fault){.code = "resource_exhausted", .err = errno};
  snprintf(f->message, sizeof f->message, "make the pipes of session %s: %s", z->name, strerror(errno));
  return -1;
}

static int open_shell(struct session *z, struct fault *f) {
  static const char *const bash[] = {"/bin/bash", "--noprofile", "--norc", NULL}, *const sh[] = {"/bin/sh", NULL};
  int fds[4][2] = {{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}}, group = -1, pidfd = -1, failed = -1; // script, out, err, control
  for (int i = 0; i < 4; i++)
    if (pipe2(fds[i], O_CLOEXEC) || set_blocking(fds[i][i == 0], 0)) { pipe_fault(f, z); goto out; }
  z->serial = ++serials;
  if ((group = group_make(group_of(z), f)) < 0) goto out;
  z->group = 1;
  struct entry e = {.argv = A.s->bash.ino ? bash : sh, .env = (const char *const *)z->env, .cwd = z->cwd, .user = z->user,
                    .in = fds[0][0], .out = fds[1][1], .err = fds[2][1], .ctl = fds[3][1], .ctl_as = CONTROL, .cgroup_fd = group, .keep = -1};
  z->pid = sandbox_enter_now(A.s, &e, &pidfd, f);
  if (z->pid < 0) {
    z->pid = 0;
    if (init_dying()) init_died();     // which is why
    if (!strcmp(f->code, "binary_not_found") || !strcmp(f->code, "not_executable")) f->code = "sandbox_damaged";
    group_drop(group_of(z));
    z->group = 0;
    goto out;
  }
  z->shell = (struct source){.on = on_shell, .fd = pidfd};
  z->control = (struct source){.on = on_control, .fd = fds[3][0]};
  z->script = (struct source){.on = on_script, .fd = fds[0][1]};
  loop_want(&z->shell, EPOLLIN);
  loop_want(&z->control, EPOLLIN);
  fds[3][0] = fds[0][1] = -1;
  for (int i = 0; i < 2; i++) {
    if (!(z->chan[i] = channel_new(fds[1 + i][0], i, 0))) { errno = ENOMEM; pipe_fault(f, z); group_kill(group_of(z)); goto out; }
    z->chan[i]->session = z;
    channel_read(z->chan[i]);
    fds[1 + i][0] = -1;
  }
  z->said_n = 0;
  z->killed = 0;
  failed = 0;
out:
  if (group >= 0) close(group);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 2; k++)
      if (fds[i][k] >= 0) close(fds[i][k]);
  return failed;
}

// commands ---------------------------------------------------------------------------------------------------------------------------

static int new_nonce(char nonce[33]) {
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) return -1;
  for (size_t i = 0; i < sizeof random; i++) snprintf(nonce + 2 * i, 3, "%02x", random[i]);
  return 0;
}

// The two lines that run a text. Quoted, it is at most four times as long.
static int make_script(struct session *z, const struct command *cmd) {
  static const char begin[] = "command eval '";
  char tail[128];
  if (new_nonce(z->nonce)) return -1;
  int n = snprintf(tail, sizeof tail, "' </dev/null %d>&-\ncommand printf '%s %%d\\n' \"$?\" >&%d\n", CONTROL, z->nonce, CONTROL);
  size_t quotes = 0;
  for (size_t i = 0; i < cmd->text_size; i++) quotes += cmd->text[i] == '\'';
  char *p = malloc(sizeof begin + cmd->text_size + 3 * quotes + (size_t)n);
  if (!p) return -1;
  z->pending = p;
  p = mempcpy(p, begin, sizeof begin - 1);
  for (size_t i = 0; i < cmd->text_size; i++) {
    if (cmd->text[i] == '\'') p = mempcpy(p, "'\\''", 4);
    else *p++ = cmd->text[i];
  }
  p = mempcpy(p, tail, (size_t)n);
  z->pending_at = 0;
  z->pending_size = (size_t)(p - z->pending);
  return 0;
}

static void lost_before_start(struct command *cmd) {
  cmd->rec.flags |= R_SESSION_LOST;
  command_kill(cmd, END_LOST);
}

// Starts the next command of the queue, in a new shell when there is none.
static void next(struct session *z) {
  while (!z->current && z->queue && !A.ending) {
    struct command *cmd = z->queue;
    struct fault f = {.code = "internal"};
    release_last(z);
    if (!z->pid && open_shell(z, &f)) {
      event("session_lost", cmd->rec.command, f.message);
      lost_before_start(cmd);
      continue;
    }
    if (make_script(z, cmd)) { lost_before_start(cmd); continue; }
    z->queue = cmd->next_queued;
    cmd->next_queued = NULL;
    z->current = cmd;
    free(cmd->text);
    cmd->text = NULL;
    z->nbefore = group_pids(group_of(z), z->before, MAX_BEFORE);
    command_begin(cmd);
    for (int i = 0; i < 2; i++)
      if (z->chan[i]) z->chan[i]->cmd = cmd;
    push_script(z);
  }
}

int session_queue(struct conn *c, struct request *r, struct command *cmd) {
  struct session *z = session_find(r->session);
  if (!z) { conn_error(c, r->id, "session_not_found", 0, "no session %.40s in sandbox %s", r->session, A.s->spec.id); return -1; }
  struct command **end = &z->queue;
  int waiting = 0;
  for (; *end; end = &(*end)->next_queued) waiting++;
  if (waiting >= MAX_SESSION_QUEUE) {
    conn_error(c, r->id, "session_busy", 0, "%d commands wait for session %s", waiting, z->name);
    return -1;
  }
  cmd->text_size = strlen(r->shell);
  if (!(cmd->text = strdup(r->shell))) { conn_error(c, r->id, "resource_exhausted", ENOMEM, "no memory for command %s", r->command); return -1; }
  cmd->session = z;
  *end = cmd;
  next(z);
  return 0;
}

// After its record was written, or instead of ever running: out of the queue, or on as the one that takes what comes between.
void session_done(struct command *cmd) {
  struct session *z = cmd->session;
  for (struct command **p = &z->queue; *p; p = &(*p)->next_queued)
    if (*p == cmd) {
      *p = cmd->next_queued;
      cmd->session = NULL;
      command_settle(cmd);
      return;
    }
  z->current = NULL;
  z->last = cmd;
  next(z);
}

void session_kill(struct command *cmd, int verdict) {
  (void)verdict;
  struct session *z = cmd->session;
  cmd->forced = 1;
  if (z->kill_at) return;
  z->kill_at = A.now + RETRY_NS;
  z->lost_at = A.now + SESSION_GRACE_NS;
  timer_want(z->kill_at);
  group_signal(group_of(z), SIGKILL, z->before, z->nbefore);
}

void session_signal(struct command *cmd, int signal) {
  struct session *z = cmd->session;
  group_signal(group_of(z), signal, z->before, z->nbefore);
}

uint64_t sessions_tick(void) {
  uint64_t due = NEVER;
  for (struct session *z = sessions, *after; z; z = after) {
    after = z->next;
    if (z->traced && z->shell.fd >= 0) {
      uint64_t at = z->traced;
      if (A.now >= at) on_shell(&z->shell, 0);           // which may free it
      else if (at < due) due = at;
      if (A.now >= at) continue;
    }
    if (!z->kill_at) continue;
    if (A.now >= z->lost_at) {         // the shell itself does not come back
      z->killed = 1;
      group_kill(group_of(z));
      z->traced = A.now + TRACED_NS;
      z->kill_at = z->lost_at = A.now + 1000 * MS;
      timer_want(z->traced);
    } else if (A.now >= z->kill_at) {
      group_signal(group_of(z), SIGKILL, z->before, z->nbefore);
      z->kill_at = A.now + RETRY_NS;
    }
    uint64_t at = z->kill_at < z->lost_at ? z->kill_at : z->lost_at;
    if (at < due) due = at;
  }
  return due;
}

// open and close ---------------------------------------------------------------------------------------------------------------------

static char *copy(const char *s, int *bad) {
  char *p = s ? strdup(s) : NULL;
  if (s && !p) *bad = 1;
  return p;
}

void session_open(struct conn *c, struct request *r) {
  if (!r->name || !id_valid(r->name)) {
    conn_error(c, r->id, "invalid_request", 0, "SESSION_OPEN: a name of 1 to 31 characters of a-z, 0-9 and - is needed");
    return;
  }
  if (session_find(r->name)) { conn_error(c, r->id, "session_exists", 0, "session %s is open", r->name); return; }
  size_t n = 0;
  for (struct session *z = sessions; z; z = z->next) n++;
  if (n >= MAX_SESSIONS) { conn_error(c, r->id, "resource_exhausted", 0, "%zu sessions are open in sandbox %s", n, A.s->spec.id); return; }
  int bad = 0;
  struct session *z = calloc(1, sizeof *z);
  if (!z) { conn_error(c, r->id, "resource_exhausted", ENOMEM, "no memory for session %s", r->name); return; }
  snprintf(z->name, sizeof z->name, "%s", r->name);
  z->shell.fd = z->control.fd = z->script.fd = -1;
  z->cwd = copy(r->cwd, &bad);
  z->user = copy(r->user, &bad);
  z->env = calloc(r->envc + 1, sizeof *z->env);
  z->before = malloc(MAX_BEFORE * sizeof *z->before);
  for (size_t i = 0; z->env && i < r->envc; i++) z->env[i] = copy(r->env[i], &bad);
  z->next = sessions;
  sessions = z;
  struct fault f = {.code = "resource_exhausted", .err = ENOMEM, .message = "no memory for a session"};
  if (bad || !z->env || !z->before || open_shell(z, &f)) {
    conn_error(c, r->id, f.code, f.err, "%s", f.message);
    free_session(z);
    return;
  }
  conn_ok(c, r->id);
}

void session_close(struct conn *c, struct request *r) {
  struct session *z = r->name ? session_find(r->name) : NULL;
  if (!z) { conn_error(c, r->id, "session_not_found", 0, "no session %.40s in sandbox %s", r->name ? r->name : "", A.s->spec.id); return; }
  z->closing = 1;
  finish_queue(z);
  if (z->current && !z->current->verdict) z->current->verdict = END_KILLED;
  if (z->current) z->current->forced = 1;
  if (z->pid) {                        // the rest when its shell is reaped
    z->killed = 1;
    group_kill(group_of(z));
  } else {
    release_last(z);
    free_session(z);
  }
  conn_ok(c, r->id);
}

void sessions_end(void) {              // after commands_end: every command is recorded
  for (struct session *z = sessions; z; z = z->next) {
    if (z->shell.fd >= 0) {
      siginfo_t info;
      for (int i = 0; i < 500; i++) {
        info.si_pid = 0;
        if (syscall(SYS_waitid, P_PIDFD, z->shell.fd, &info, WEXITED | WNOHANG, NULL) || info.si_pid) break;
        usleep(2000);
      }
    }
    release_last(z);
    if (z->group) group_drop(group_of(z));
  }
}
