// A command's stdin: what its pipe or terminal does not take stays in the frame it came in, and that connection is not read meanwhile.
#include "aether.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <termios.h>
#include <unistd.h>

static void on_stdin(struct source *src, uint32_t events) {
  (void)events;                        // also when nobody reads any more: the write says so
  struct command *cmd = OWNER(src, struct command, in);
  if (cmd->feeder) stdin_feed(cmd);
  else loop_want(src, 0);
}

void stdin_open(struct command *cmd, int fd) { cmd->in = (struct source){.on = on_stdin, .fd = fd}; }

static void shut(struct command *cmd) {
  if (cmd->in.fd < 0) return;
  if (cmd->pty) {                      // the terminal stays open for its output; the reader gets the end-of-file character
    struct termios t;
    unsigned char c = tcgetattr(cmd->in.fd, &t) ? 4 : t.c_cc[VEOF];
    (void)!write(cmd->in.fd, &c, 1);
  }
  loop_close(&cmd->in);
}

void stdin_feed(struct command *cmd) {
  struct conn *c = cmd->feeder;
  while (c->feed_left) {
    ssize_t n = write(cmd->in.fd, c->feed, c->feed_left);
    if (n >= 0) { c->feed += n; c->feed_left -= (size_t)n; continue; }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) { loop_want(&cmd->in, EPOLLOUT); return; }
    int err = errno;                   // EPIPE: it closed its stdin; EIO: the terminal is gone
    cmd->feeder = NULL;
    loop_close(&cmd->in);
    conn_error(c, c->head.request, "stdin_closed", err, "command %s does not read its stdin any more", cmd->rec.command);
    if (!c->closed) conn_fed(c);
    return;
  }
  cmd->feeder = NULL;
  loop_want(&cmd->in, 0);
  if (cmd->eof_in) shut(cmd);
  conn_ok(c, c->head.request);
  if (!c->closed) conn_fed(c);
}

static struct command *open_stdin(struct conn *c, struct request *r) {
  struct command *cmd = command_find(r->command);
  if (!cmd) conn_error(c, r->id, "command_not_found", 0, "no command %s in sandbox %s", r->command, A.s->spec.id);
  else if (cmd->state == C_ENDED) conn_error(c, r->id, "command_ended", 0, "command %s has ended", r->command);
  else if (cmd->in.fd < 0 || cmd->eof_in) conn_error(c, r->id, "stdin_closed", 0, "stdin of command %s is not open", r->command);
  else { command_unref(cmd); return cmd; }
  if (cmd) command_unref(cmd);
  return NULL;
}

void stdin_request(struct conn *c, struct request *r) {
  struct command *cmd = open_stdin(c, r);
  if (!cmd) return;
  if (cmd->feeder) {
    conn_error(c, r->id, "invalid_request", 0, "another connection writes the stdin of command %s", r->command);
    return;
  }
  c->feeding = cmd;
  c->feed = r->bytes;
  c->feed_left = r->nbytes;
  cmd->feeder = c;
  stdin_feed(cmd);
}

void stdin_finish(struct conn *c, struct request *r) {
  struct command *cmd = open_stdin(c, r);
  if (!cmd) return;
  if (cmd->feeder) cmd->eof_in = 1;    // after what another connection has under way
  else shut(cmd);
  conn_ok(c, r->id);
}

void stdin_close(struct command *cmd) {
  struct conn *c = cmd->feeder;
  cmd->feeder = NULL;
  loop_close(&cmd->in);
  if (!c) return;
  conn_error(c, c->head.request, "stdin_closed", 0, "command %s ended before it read all of its stdin", cmd->rec.command);
  if (!c->closed) conn_fed(c);
}
