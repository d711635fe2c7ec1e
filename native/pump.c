// Replies of more than one frame: each call makes the next one, so that nothing is built before its reader takes it.
#include "aether.h"
#include <string.h>

#define SPACE (sizeof(struct frame) + WIRE_MAX)
static uint8_t space[SPACE];           // touched only as far as the largest reply needs

static struct buf big(void) { return (struct buf){.data = space, .cap = SPACE}; }

// Totals as the logs have them now; the file geometry stays what it was.
static struct record current(const struct command *cmd) {
  struct record r = cmd->rec;
  r.pid = (uint32_t)command_pid(cmd);
  r.magic = RECORD_MAGIC;
  r.out_total = cmd->log[0].total; r.out_dropped = r.out_total - log_kept(&cmd->log[0]);
  r.err_total = cmd->log[1].total; r.err_dropped = r.err_total - log_kept(&cmd->log[1]);
  r.out_inline = r.err_inline = 0;
  r.size = sizeof r;
  if (cmd->log[0].evicted || cmd->log[1].evicted) r.flags |= R_LOG_EVICTED;
  return r;
}

static void add_record(struct buf *b, const struct command *cmd, int with_inline) {
  struct record r = current(cmd);
  if (!with_inline) { frame_bytes(b, T_RECORD, &r, sizeof r); return; }
  if (!cmd->log[0].file) r.out_inline = (uint32_t)cmd->log[0].total;
  if (!cmd->log[1].file) r.err_inline = (uint32_t)cmd->log[1].total;
  r.size = (uint32_t)sizeof r + r.out_inline + r.err_inline;
  struct field f = {.tag = T_RECORD, .size = r.size};
  frame_raw(b, &f, sizeof f);
  frame_raw(b, &r, sizeof r);
  frame_raw(b, cmd->log[0].small, r.out_inline);
  frame_raw(b, cmd->log[1].small, r.err_inline);
}

void record_frame(struct conn *c, uint8_t type, uint32_t request, const struct command *cmd, int with_inline) {
  struct buf b = big();
  frame_begin(&b, type, 0, request);
  add_record(&b, cmd, with_inline);
  conn_reply(c, &b);
}

// A field with the first `max` bytes of what a log has: its head, then its tail.
static void add_log(struct buf *b, uint16_t tag, struct log *l, size_t max) {
  size_t start = b->used;
  struct field f = {.tag = tag};
  frame_raw(b, &f, sizeof f);
  for (uint64_t at = 0; max;) {
    struct piece p = log_piece(l, at, max);
    if (!p.size || b->overflow || p.size > b->cap - b->used) break;
    size_t n = log_read(l, p, b->data + b->used);
    b->used += n;
    max -= n;
    if (n < p.size) break;
    at = p.from + n;
  }
  f.size = (uint32_t)(b->used - start - sizeof f);
  memcpy(b->data + start, &f, sizeof f);
}

static void collect_frame(struct conn *c, uint32_t request, struct command *cmd) {
  struct buf b = big();
  frame_begin(&b, F_END, 0, request);
  add_record(&b, cmd, 0);
  size_t room = SPACE - b.used - 2 * sizeof(struct field);
  uint64_t out = log_kept(&cmd->log[0]), err = log_kept(&cmd->log[1]);
  size_t err_room = err < room / 2 ? (size_t)err : out < room / 2 ? room - (size_t)out : room / 2;
  add_log(&b, T_STDOUT, &cmd->log[0], room - err_room);
  add_log(&b, T_STDERR, &cmd->log[1], err_room);
  conn_reply(c, &b);
}

// One DATA frame of at most `max` bytes from `offset` on. Returns the offset behind it.
static uint64_t data_frame(struct conn *c, uint32_t request, struct log *l, int which, struct piece p) {
  struct buf b = big();
  frame_begin(&b, F_DATA, which ? STREAM_ERR : STREAM_OUT, request);
  frame_raw(&b, &p.from, sizeof p.from);
  size_t n = log_read(l, p, b.data + b.used);
  b.used += n;
  conn_reply(c, &b);
  return p.from + n;
}

void log_reply(struct conn *c, uint32_t request, struct command *cmd, int which, uint64_t offset, uint64_t length) {
  struct log *l = &cmd->log[which];
  if (offset > l->total) offset = l->total;
  struct piece p = log_piece(l, offset, length < WIRE_MAX - 8 ? (size_t)length : WIRE_MAX - 8);
  data_frame(c, request, l, which, p);
}

static void gap_frame(struct conn *c, uint32_t request, int which, uint64_t from, uint64_t to) {
  struct buf b = reply_buf();
  frame_begin(&b, F_GAP, 0, request);
  frame_u64(&b, T_STREAM, which ? STREAM_ERR : STREAM_OUT);
  frame_u64(&b, T_FROM, from);
  frame_u64(&b, T_TO, to);
  conn_reply(c, &b);
}

static int attach(struct sub *s) {
  struct command *cmd = s->cmd;
  for (int which = 0; which < 2; which++) {
    struct log *l = &cmd->log[which];
    uint64_t at = s->at[which];
    if (at >= l->total) continue;
    struct piece p = log_piece(l, at, WIRE_DATA);
    if (p.from > at) {
      s->at[which] = p.from;
      gap_frame(s->conn, s->request, which, at, p.from);
      return 1;
    }
    uint64_t next = data_frame(s->conn, s->request, l, which, p);
    if (next == at) {                  // the file went from under us: a gap, never an endless loop
      next = at + p.size;
      gap_frame(s->conn, s->request, which, at, next);
    }
    s->at[which] = next;
    return 1;
  }
  if (cmd->state == C_ENDED) { record_frame(s->conn, F_END, s->request, cmd, 0); return -1; }
  if (s->follow) return 0;
  conn_ok(s->conn, s->request);
  return -1;
}

// Running and waiting commands first, then the records. at[0] counts the live ones shown, at[1] is the next record.
static int list(struct sub *s) {
  if (s->at[0] != UINT64_MAX) {
    uint64_t i = 0;
    for (struct command *cmd = A.live; cmd; cmd = cmd->next) {
      if ((cmd->state == C_ENDED && cmd->saved) || i++ < s->at[0]) continue;
      s->at[0]++;
      record_frame(s->conn, F_RECORD, s->request, cmd, 0);
      return 1;
    }
    s->at[0] = UINT64_MAX;
  }
  if (s->at[1] < records_first()) s->at[1] = records_first();
  while (s->at[1] < records_end()) {
    struct record r;
    if (records_at(s->at[1]++, &r)) continue;
    r.size = sizeof r;
    r.out_inline = r.err_inline = 0;
    struct buf b = reply_buf();
    frame_begin(&b, F_RECORD, 0, s->request);
    frame_bytes(&b, T_RECORD, &r, sizeof r);
    conn_reply(s->conn, &b);
    return 1;
  }
  conn_ok(s->conn, s->request);
  return -1;
}

static int sessions(struct sub *s) {
  const char *name;
  int busy;
  if (!session_at((size_t)s->at[0]++, &name, &busy)) { conn_ok(s->conn, s->request); return -1; }
  struct buf b = reply_buf();
  frame_begin(&b, F_RECORD, 0, s->request);
  frame_text(&b, T_NAME, name);
  frame_u64(&b, T_STATE, (uint64_t)busy);
  conn_reply(s->conn, &b);
  return 1;
}

int sub_pump(struct sub *s) {
  if (s->announce) return 0;
  switch (s->kind) {
    case SUB_LIST: return list(s);
    case SUB_SESSIONS: return sessions(s);
    case SUB_ATTACH: return attach(s);
    default:
      if (s->cmd->state != C_ENDED) return 0;
      if (s->kind == SUB_COLLECT) collect_frame(s->conn, s->request, s->cmd);
      else record_frame(s->conn, F_END, s->request, s->cmd, s->kind == SUB_WAIT);
      return -1;
  }
}
