// EXEC: checks a request, makes the pipes and the group of a command, and lets it enter the sandbox.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include "util.h"

#define MIN_RUNNING 64
#define START_NS (60000 * MS)

// Command ids and session names: lower case letters, digits and dashes, so that they are file and cgroup names as they are.
int id_valid(const char *id) {
  size_t n = 0;
  for (; id[n]; n++)
    if (n == ID_SIZE - 1 || !((id[n] >= 'a' && id[n] <= 'z') || (id[n] >= '0' && id[n] <= '9') || id[n] == '-')) return 0;
  return n > 0;
}

struct ends { int in[2], out[2], err[2]; };             // [0] read, [1] write; the child's side and ours

static void shut(int fds[2]) {
  for (int i = 0; i < 2; i++)
    if (fds[i] >= 0) { close(fds[i]); fds[i] = -1; }
}

static int fault(struct fault *f, const char *what) {
  *f = (struct fault){.code = errno == EMFILE || errno == ENFILE || errno == ENOMEM ? "resource_exhausted" : "internal", .err = errno};
  snprintf(f->message, sizeof f->message, "%s: %s", what, strerror(errno));
  return -1;
}

static int one_pipe(int fds[2], int ours, struct fault *f) {
  if (pipe2(fds, O_CLOEXEC)) { fds[0] = fds[1] = -1; return fault(f, "make a pipe for the command"); }
  return set_blocking(fds[ours], 0) ? fault(f, "make a pipe for the command") : 0;
}

// Puts the whole input into the pipe at once: it is widened to hold it.
static int fill_stdin(int fd, const uint8_t *p, size_t n, struct fault *f) {
  if (n > 65536 && fcntl(fd, F_SETPIPE_SZ, 1 << 20) < 0) return fault(f, "widen the stdin pipe");
  while (n) {
    ssize_t r = write(fd, p, n);
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) return fault(f, "write the command's stdin");
    p += r; n -= (size_t)r;
  }
  return 0;
}

static int make_ends(struct request *r, struct ends *e, struct fault *f) {
  if (r->flags & X_PTY) {
    int slave = -1, master = sandbox_pty(A.s, r->rows ? (int)r->rows : 24, r->cols ? (int)r->cols : 80, &slave, f);
    if (master < 0) return -1;
    e->out[0] = master;
    e->out[1] = slave;
    if (set_blocking(master, 0)) return fault(f, "prepare the terminal");
    e->in[1] = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return e->in[1] < 0 ? fault(f, "prepare the terminal") : 0;
  }
  if (one_pipe(e->out, 0, f)) return -1;
  if (!(r->flags & X_MERGE) && one_pipe(e->err, 0, f)) return -1;
  if (!(r->flags & X_STDIN) && !(r->present & HAS_BYTES)) return 0; // /dev/null
  if (one_pipe(e->in, 1, f) || fill_stdin(e->in[1], r->bytes, r->nbytes, f)) return -1;
  if (!(r->flags & X_STDIN)) { close(e->in[1]); e->in[1] = -1; }
  return 0;
}

static void on_status(struct source *src, uint32_t events);

// Begins it. Its subs hear later how it went.
static int start(struct command *cmd, struct request *r, struct fault *f) {
  struct ends e = {{-1, -1}, {-1, -1}, {-1, -1}};
  char name[ID_SIZE + 4];
  int group = -1, failed = -1;
  cmd->pty = r->flags & X_PTY ? 1 : 0;
  if (make_ends(r, &e, f)) goto out;
  command_group(cmd, name);
  if ((group = group_make(name, f)) < 0) goto out;
  cmd->group = 1;
  for (int i = 0; i < 2; i++) {
    int *fds = i ? e.err : e.out;
    if (fds[0] < 0) continue;
    if (!(cmd->chan[i] = channel_new(fds[0], i, cmd->pty))) {
      errno = ENOMEM;
      fault(f, "prepare the command's output");
      goto out;
    }
    cmd->chan[i]->cmd = cmd;
    fds[0] = -1;
  }
  if (!cmd->pty && e.in[0] >= 0) cmd->in_pipe = pipe_inode(e.in[0]);
  struct entry entry = {
    .argv = r->shell ? NULL : r->argv, .env = r->envc ? r->env : NULL, .shell_text = r->shell, .cwd = r->cwd, .user = r->user,
    .in = cmd->pty ? e.out[1] : e.in[0], .out = e.out[1], .err = e.err[1] >= 0 ? e.err[1] : e.out[1], .tty = cmd->pty,
    .ctl = -1, .cgroup_fd = group, .group = name, .keep = -1,
  };
  command_begin(cmd);
  if (sandbox_enter(A.s, &entry, &cmd->start, f)) goto out;
  cmd->pid = cmd->start.pid;
  cmd->status = (struct source){.on = on_status, .fd = cmd->start.status};
  loop_want(&cmd->status, EPOLLIN);
  timer_want(A.now + START_LOOK_MS * MS);
  if (e.in[1] >= 0) { stdin_open(cmd, e.in[1]); e.in[1] = -1; }
  failed = 0;
out:
  if (group >= 0) close(group);
  shut(e.in);
  shut(e.out);
  shut(e.err);
  return failed;
}

int exec_starting(const struct command *cmd) { return cmd->status.fd >= 0; }

static void never_ran(struct command *cmd, const struct fault *f) {
  loop_close(&cmd->status);
  subs_failed(cmd, f);
  command_discard(cmd);
}

static void on_status(struct source *src, uint32_t events) {
  (void)events;
  struct command *cmd = OWNER(src, struct command, status);
  struct fault f = {0};
  int pidfd = -1;
  if (start_done(&cmd->start, &cmd->pid, &pidfd, &f)) {
    if (init_dying()) {                // which is why
      loop_close(src);
      subs_started(cmd);
      init_died();
    }
    never_ran(cmd, &f);
    return;
  }
  loop_close(src);
  command_watch(cmd, pidfd);
  subs_started(cmd);
  channels_resume(cmd);
}

// A program may be slow to load, and whatever can be asked of a running one can be asked of it; but it does not start for ever.
void exec_tick(struct command *cmd) {
  struct fault f = {0};
  if (A.now - cmd->started > START_NS) fault_set(&f, "internal", 0, "the program did not start within %llu s", START_NS / 1000000000ull);
  else if (!start_look(&cmd->start, &f)) return;
  start_abandon(&cmd->start);
  never_ran(cmd, &f);
}

void exec_end(struct command *cmd) {
  loop_close(&cmd->status);
  start_abandon(&cmd->start);
  subs_started(cmd);                   // whose end follows
}

// A repeated id: the same definition attaches to what is there, another one is an error. It never runs again.
static void again(struct conn *c, struct request *r, struct command *cmd) {
  if (cmd->definition != r->definition)
    conn_error(c, r->id, "command_exists", 0, "command %s exists with another definition", r->command);
  else if (r->flags & X_COLLECT) sub_new(c, cmd, r->id, SUB_COLLECT);
  else {
    struct sub *s = NULL;
    if (!exec_starting(cmd)) command_started(c, r->id, cmd);
    if (r->flags & X_STREAM) s = c->closed ? NULL : sub_new(c, cmd, r->id, SUB_ATTACH);
    else if (exec_starting(cmd)) s = sub_new(c, cmd, r->id, SUB_START);
    if (s) s->follow = 1;
    if (s && exec_starting(cmd)) s->announce = 1;
  }
  if (!c->closed) conn_pump_soon(c);
  command_unref(cmd);
}

static const char *wrong(const struct request *r) {
  if (!r->command || !id_valid(r->command)) return "an id of 1 to 31 characters of a-z, 0-9 and - is needed";
  if (!r->shell == !r->argc) return "exactly one of an argument list and a shell text is needed";
  if (r->argc && !r->argv[0][0]) return "the name of the program is empty";
  if (r->session && !r->shell) return "a session runs shell text, not an argument list";
  if (r->session && (r->cwd || r->user || r->envc)) return "directory, user and environment of a session are set when it is opened";
  if (r->session && (r->flags & (X_STDIN | X_PTY | X_MERGE) || r->present & HAS_BYTES))
    return "a command in a session has no stdin, terminal or merged output of its own";
  if (r->flags & X_STREAM && r->flags & X_COLLECT) return "stream and collect exclude each other";
  if (r->flags & X_PTY && r->present & HAS_BYTES) return "a terminal gets its input by STDIN";
  if (r->nbytes > STDIN_MAX) return "stdin given with the command is at most 512 KiB";
  if (r->rows > 65535 || r->cols > 65535) return "a terminal has at most 65535 rows and columns";
  if (r->flags >> 7) return "an unknown flag";
  return NULL;
}

void command_exec(struct conn *c, struct request *r) {
  const char *text = wrong(r);
  if (text) { conn_error(c, r->id, "invalid_request", 0, "EXEC: %s", text); return; }
  struct command *cmd = command_find(r->command);
  if (cmd) { again(c, r, cmd); return; }
  int most = A.s->spec.pids > MIN_RUNNING ? (int)A.s->spec.pids : MIN_RUNNING;
  if (A.running >= most) {
    conn_error(c, r->id, "pids_limit", 0, "%d commands run in sandbox %s, as many as it may have processes", A.running, A.s->spec.id);
    return;
  }
  cmd = command_new(r->command, r->definition);
  if (!cmd) { conn_error(c, r->id, "resource_exhausted", ENOMEM, "no memory for command %s", r->command); return; }
  const struct spec *spec = &A.s->spec;
  uint64_t head = r->present & HAS_HEAD && r->log_head < spec->log_head ? r->log_head : spec->log_head;
  uint64_t tail = r->present & HAS_TAIL && r->log_tail < spec->log_tail ? r->log_tail : spec->log_tail;
  for (int i = 0; i < 2; i++) log_init(&cmd->log[i], r->command, i, head, tail);
  cmd->rec.head = cmd->log[0].head;
  cmd->rec.tail = cmd->log[0].tail;
  cmd->shell = r->shell != NULL;
  cmd->stop = (uint8_t)(r->flags & (X_STOP_AT_OUTPUT | X_STOP_AT_DISK));
  cmd->timeout_ns = r->present & HAS_TIMEOUT ? r->timeout_ns : 0;
  struct fault f = {.code = "internal"};
  command_ref(cmd);                    // ours, while it may end under our hands
  if (r->session ? session_queue(c, r, cmd) : start(cmd, r, &f)) {
    if (!r->session) conn_error(c, r->id, f.code, f.err, "%s", f.message);
    command_discard(cmd);
  } else {
    int kind = r->flags & X_STREAM ? SUB_STREAM : r->flags & X_COLLECT ? SUB_COLLECT : SUB_START;
    if (kind != SUB_COLLECT && !exec_starting(cmd)) command_started(c, r->id, cmd); // it waits in a session
    struct sub *s = c->closed || (kind == SUB_START && !exec_starting(cmd)) ? NULL : sub_new(c, cmd, r->id, kind);
    if (s) s->announce = kind != SUB_COLLECT && exec_starting(cmd);
    if (!c->closed && cmd->state == C_ENDED) conn_pump_soon(c);
  }
  command_unref(cmd);
}
