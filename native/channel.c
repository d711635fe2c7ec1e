// The output side: pipe to log, and to the one connection that streams it. One read, one write to the log, one send.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define WIDE_PIPE (1 << 20)
static struct { struct frame head; uint64_t offset; uint8_t bytes[WIRE_DATA]; } __attribute__((packed)) data;
_Static_assert(sizeof data == sizeof(struct frame) + 8 + WIRE_DATA, "a DATA frame in place");

struct sub *streamer(const struct command *cmd) {
  for (struct sub *s = cmd->subs; s; s = s->next_of_command)
    if (s->kind == SUB_STREAM) return s;
  return NULL;
}

static int held_back(const struct channel *ch) {
  if (A.ending) return 0;              // the end waits for no reader; the queue is bounded
  struct sub *s = ch->cmd && ch->cmd->state != C_ENDED ? streamer(ch->cmd) : NULL;
  return s && conn_full(s->conn);
}

static void take(struct channel *ch, size_t n) {
  struct command *cmd = ch->cmd;
  ch->owed -= n < ch->owed ? n : ch->owed;
  if (!cmd) return;                    // a session's before its first command: nobody's output
  struct log *l = &cmd->log[ch->which];
  data.offset = l->total;
  log_write(l, data.bytes, n);
  struct sub *s = cmd->state == C_ENDED ? NULL : streamer(cmd);
  if (s) {
    data.head = (struct frame){.length = (uint32_t)(sizeof data.head - 4 + 8 + n), .type = F_DATA,
                               .flags = ch->which ? STREAM_ERR : STREAM_OUT, .request = s->request};
    conn_send(s->conn, &data, sizeof data.head + 8 + n);
  }
  if (cmd->subs && !(s && !s->next_of_command && cmd->subs == s)) subs_wake(cmd);
  if (cmd->stop & X_STOP_AT_OUTPUT && l->total > (uint64_t)l->head + l->tail) command_kill(cmd, END_OUTPUT_LIMIT);
}

// 1: something came, 0: nothing there now, -1: the end
static int read_once(struct channel *ch) {
  ssize_t n;
  do n = read(ch->src.fd, data.bytes, WIRE_DATA); while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return 0;
  if (n <= 0) return -1;               // EIO: the last user of a PTY's slave is gone
  if (n == 65536 && !ch->pty) fcntl(ch->src.fd, F_SETPIPE_SZ, WIDE_PIPE); // full, so it is worth it; EPERM leaves it slower
  take(ch, (size_t)n);
  return 1;
}

static void on_channel(struct source *src, uint32_t events) {
  (void)events;
  struct channel *ch = OWNER(src, struct channel, src);
  if (held_back(ch)) { loop_want(src, 0); return; }
  struct command *cmd = ch->cmd;
  int own = cmd && cmd->chan[ch->which] == ch;
  int r = read_once(ch);
  if (src->fd < 0) return;             // what it caused closed it
  if (r < 0) channel_close(ch);
  else if (held_back(ch)) loop_want(src, 0);
  if (cmd && cmd->state == C_DRAINING) command_drain(cmd);
  else if (cmd && cmd->state == C_ENDED && own && r < 0) command_settle(cmd);
}

struct channel *channel_of(const struct command *cmd, int which) {
  if (cmd->chan[which]) return cmd->chan[which];
  struct channel *ch = cmd->session ? session_channel(cmd->session, which) : NULL;
  return ch && ch->cmd == cmd ? ch : NULL;
}

void channels_resume(const struct command *cmd) {
  for (int i = 0; i < 2; i++) {
    struct channel *ch = channel_of(cmd, i);
    if (ch) channel_read(ch);
  }
}

struct channel *channel_new(int fd, int which, int pty) {
  struct channel *ch = calloc(1, sizeof *ch);
  if (!ch) return NULL;
  ch->src = (struct source){.on = on_channel, .fd = fd};
  ch->which = which;
  ch->pty = pty;
  return ch;
}

void channel_read(struct channel *ch) {
  if (ch->src.fd >= 0) loop_want(&ch->src, EPOLLIN);
}

void channel_close(struct channel *ch) {
  if (ch->src.fd < 0) return;
  loop_close(&ch->src);
  ch->owed = 0;
  struct command *cmd = ch->cmd;
  if (cmd && cmd->chan[ch->which] == ch) {
    cmd->chan[ch->which] = NULL;
    loop_free(ch);
  }
}

// What is in the pipe at this moment was written before its process ended, and belongs to the result.
void channel_owe(struct channel *ch) {
  int n = 0;
  if (ch->src.fd >= 0 && !ioctl(ch->src.fd, FIONREAD, &n) && n > 0) ch->owed = (uint64_t)n;
}

void channel_drain(struct channel *ch) {
  size_t limit = 2 * WIDE_PIPE / WIRE_DATA;              // somebody else may write for ever
  for (size_t i = 0; i < limit && ch->src.fd >= 0; i++) {
    if (held_back(ch)) { loop_want(&ch->src, 0); return; }
    int r = read_once(ch);
    if (r < 0) { if (ch->src.fd >= 0) channel_close(ch); return; }
    if (!r) return;
  }
}
