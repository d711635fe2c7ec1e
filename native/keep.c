// The running commands of a sandbox that is hibernated with its memory: what their pipes still hold goes into their logs, and the logs and what
// the next supervisor has to know go to the disk, beside the images (checkpoint.c). Nothing inside has run since those were taken, nor will it.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "util.h"

static int sync_log(const struct log *l) { return l->fd >= 0 && fsync(l->fd) ? -1 : 0; }

static int keep(struct command *cmd, int dir, struct fault *f) {
  char path[ID_SIZE + 16];
  struct memory m;
  struct record *r = &m.rec;
  snprintf(path, sizeof path, "%s/" MEMORY_FILE, cmd->rec.command);
  int fd = openat(dir, path, O_RDWR | O_CLOEXEC), bad = fd < 0 || read(fd, &m, sizeof m) != sizeof m;
  for (int i = 0; !bad && i < 2; i++) {
    if (cmd->chan[i]) channel_drain(cmd->chan[i]);
    log_spill(&cmd->log[i]);
    m.total[i] = cmd->log[i].total;
    m.room[i] = cmd->log[i].room;
    bad = sync_log(&cmd->log[i]);
  }
  if (!bad) {
    *r = cmd->rec;
    r->magic = RECORD_MAGIC;
    r->size = sizeof *r;
    r->out_total = m.total[0]; r->out_dropped = m.total[0] - log_kept(&cmd->log[0]);
    r->err_total = m.total[1]; r->err_dropped = m.total[1] - log_kept(&cmd->log[1]);
    r->out_inline = r->err_inline = 0;
    r->ending = END_RUNNING;
    r->pid = m.pid;
    bad = pwrite(fd, &m, sizeof m, 0) != sizeof m || fsync(fd);
  }
  if (bad) fault_host(f, errno, "keep what command %s wrote", cmd->rec.command);
  close_fd(&fd);
  return bad ? -1 : 0;
}

int keep_all(const char *where, struct fault *f) {
  int dir = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = dir < 0;
  if (bad) fault_host(f, errno, "open %s", where);
  A.ending = 1;                        // whoever reads slowly waits for the next supervisor
  for (struct command *cmd = A.live; !bad && cmd; cmd = cmd->next)
    if (command_runs(cmd)) bad = keep(cmd, dir, f);
  int mark = bad ? -1 : openat(dir, KEPT_FILE, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (!bad && (mark < 0 || fsync(mark) || fsync(dir))) bad = fault_host(f, errno, "keep the commands of %s", A.s->spec.id);
  for (struct command *cmd = A.live; !bad && cmd; cmd = cmd->next) cmd->kept = (uint8_t)command_runs(cmd);
  close_fd(&mark);
  close_fd(&dir);
  if (bad) A.ending = 0;
  return bad ? -1 : 0;
}
