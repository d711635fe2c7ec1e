// A fork of a microVM with its memory, the supervisor's part: CHECKPOINT holds the machine still enough to be copied and writes down what its
// commands are; whoever copies it then says RESUME. In a copy RESTORE takes the commands up where they are.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "machine.h"
#include "node.h"
#include "util.h"

#define HOLD_NS (20000 * MS)           // then whoever copies it is gone

static uint64_t held_until;

static int write_memory(const char *dir, const struct command *cmd, struct fault *f) {
  char path[PATH_MAX];
  struct memory m = {.magic = MEMORY_MAGIC, .pid = (uint32_t)cmd->pid, .rec = cmd->rec, .definition = cmd->definition, .timeout_ns = cmd->timeout_ns,
                     .left_ns = cmd->deadline == NEVER ? NEVER : cmd->deadline > A.now ? cmd->deadline - A.now : 0,
                     .pipe = {cmd->in.fd >= 0, cmd->chan[0] != NULL, cmd->chan[1] != NULL}, .shell = cmd->shell, .stop = cmd->stop,
                     .input = cmd->in.fd >= 0};
  snprintf(path, sizeof path, "%s/%.31s", dir, cmd->rec.command);
  int bad = mkdir(path, 0700);
  size_t n = strlen(path);
  snprintf(path + n, sizeof path - n, "/" MEMORY_FILE);
  int fd = bad ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  bad = fd < 0 || write(fd, &m, sizeof m) != sizeof m ? fault_host(f, errno, "write down command %s", cmd->rec.command) : 0;
  close_fd(&fd);
  return bad;
}

static int write_all(const char *dir, struct fault *f) {
  for (struct command *cmd = A.live; cmd; cmd = cmd->next) {
    if (cmd->state == C_ENDED) continue;
    if (cmd->state != C_RUNNING || exec_starting(cmd) || cmd->pty)
      return fault_set(f, "checkpoint_failed", 0, "command %s %s", cmd->rec.command, cmd->pty ? "has a terminal" : "starts or ends at this moment");
    if (write_memory(dir, cmd, f)) return -1;
  }
  return 0;
}

void machine_checkpoint(struct conn *c, struct request *r) {
  struct fault f = {0};
  pause_end();
  if (snapshot_under_way()) fault_set(&f, "unavailable", 0, "a snapshot of sandbox %s is being taken", A.s->spec.id);
  else if (!r->name || !snapshot_named(r->name)) fault_set(&f, "invalid_request", 0, "CHECKPOINT: a name is needed");
  else if (!machine_hold(&f) && (write_all(r->path, &f) || medium_snapshot(A.s, r->name, &f))) machine_thaw();
  if (f.code) { conn_error(c, r->id, f.code, f.err, "%s", f.message); return; }
  held_until = A.now + HOLD_NS;
  timer_want(held_until);
  conn_ok(c, r->id);
}

uint64_t machine_tick(void) {
  if (!held_until) return NEVER;
  if (A.now < held_until) return held_until;
  held_until = 0;
  machine_thaw();                      // nothing when it was resumed
  return NEVER;
}

static int take_up(const char *dir, const char *name, struct fault *f) {
  char path[PATH_MAX];
  struct memory m;
  int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, end = -1;
  snprintf(path, sizeof path, "%s/%.31s/" MEMORY_FILE, dir, name);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  int good = fd >= 0 && read(fd, &m, sizeof m) == sizeof m && m.magic == MEMORY_MAGIC;
  close_fd(&fd);
  m.rec.command[ID_SIZE - 1] = 0;
  if (!good || !id_valid(m.rec.command)) return fault_set(f, "internal", 0, "what %s says is not complete", path);
  struct command *cmd = command_new(m.rec.command, m.definition);
  if (!cmd) return fault_set(f, "resource_exhausted", ENOMEM, "no memory for command %s", m.rec.command);
  cmd->rec.head = m.rec.head;
  cmd->rec.tail = m.rec.tail;
  for (int i = 0; i < 2; i++) log_init(&cmd->log[i], m.rec.command, i, m.rec.head, m.rec.tail);
  cmd->shell = m.shell;
  cmd->stop = m.stop;
  cmd->group = 1;
  command_begin(cmd);
  cmd->timeout_ns = m.timeout_ns;
  cmd->rec.start_ns = m.rec.start_ns;
  cmd->pid = (pid_t)m.pid;
  if ((m.input && pipe2(in, O_CLOEXEC)) || (m.pipe[1] && pipe2(out, O_CLOEXEC)) || (m.pipe[2] && pipe2(err, O_CLOEXEC)))
    return fault_host(f, errno, "make a pipe");
  int *ends[2] = {out, err};
  for (int i = 0; i < 2; i++) {
    if (ends[i][0] < 0) continue;
    if (set_blocking(ends[i][0], 0) || !(cmd->chan[i] = channel_new(ends[i][0], i, 0))) return fault_host(f, ENOMEM, "prepare the output of a command");
    cmd->chan[i]->cmd = cmd;
  }
  if (in[1] >= 0) {
    if (set_blocking(in[1], 0)) return fault_host(f, errno, "prepare the input of a command");
    stdin_open(cmd, in[1]);
  }
  if (m.left_ns != NEVER) {
    cmd->deadline = A.now + m.left_ns;
    timer_want(cmd->deadline);
  }
  machine_streams(m.pid, in[0], out[1], err[1], f);
  if (f->code || machine_adopt(m.pid, &end, f)) return -1;
  command_watch(cmd, end);
  channels_resume(cmd);
  return 0;
}

void machine_restore(struct conn *c, struct request *r) {
  struct fault f = {0};
  DIR *d = r->path && *r->path == '/' && !A.running ? opendir(r->path) : NULL;
  if (!d) { conn_error(c, r->id, "invalid_request", 0, "RESTORE: a directory is needed, and a sandbox in which nothing runs"); return; }
  for (struct dirent *e; !f.code && (e = readdir(d));)
    if (*e->d_name != '.') take_up(r->path, e->d_name, &f);
  closedir(d);
  if (f.code) conn_error(c, r->id, f.code, f.err, "%s", f.message);
  else conn_ok(c, r->id);
}
