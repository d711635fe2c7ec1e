// See mux.h.
#include "mux.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include "util.h"

#define AFTER_LENGTH (sizeof(struct frame) - sizeof(uint32_t))
#define PIECE (32u << 10)              // bytes of one DATA frame
#define OUT_HIGH (512u << 10)          // so much waits for the channel: flows are not read
#define OUT_MOST (64u << 20)           // a peer that reads nothing is lost
#define FLOWS_MOST 8192

const struct mux_user *mux_user;
static struct source channel = {.fd = -1};
static struct frame head;
static size_t head_got, in_got;
static uint8_t in[WIRE_MAX];
static uint8_t *out;
static size_t out_at, out_used, out_cap;
static struct flow *flows;
static int nflows, held, quiet;        // held: flows wait until the channel has taken what there is
static uint8_t building[sizeof(struct frame) + WIRE_MAX];
static struct { struct frame head; uint8_t bytes[PIECE]; } __attribute__((packed)) data;

struct buf mux_buf(void) { return (struct buf){.data = building, .cap = sizeof building}; }

static void lost(const char *why) {
  loop_close(&channel);
  mux_user->lost(why);
}

// out -----------------------------------------------------------------------------------------------------------------------------------

static void on_flow(struct source *src, uint32_t events);

static void release(void) {
  if (!held || quiet || out_used - out_at > OUT_HIGH / 2) return;
  held = 0;
  for (struct flow *w = flows; w; w = w->next)
    if (w->sends && w->credit) loop_want(&w->src, EPOLLIN);
}

static void flush(void) {
  while (out_at < out_used && channel.fd >= 0 && !quiet) {
    ssize_t n = write(channel.fd, out + out_at, out_used - out_at);
    if (n > 0) { out_at += (size_t)n; continue; }
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 || errno == EAGAIN) break;
    lost("it cannot be written");
    return;
  }
  if (out_at == out_used) out_at = out_used = 0;
  if (channel.fd >= 0) loop_want(&channel, out_used && !quiet ? EPOLLIN | EPOLLOUT : EPOLLIN);
  release();
}

static void put(const void *p, size_t n) {
  if (channel.fd < 0) return;
  if (out_at && out_used + n > out_cap) {
    memmove(out, out + out_at, out_used - out_at);
    out_used -= out_at;
    out_at = 0;
  }
  if (out_used + n > out_cap) {
    size_t wider = out_cap ? out_cap : 64 << 10;
    while (wider < out_used + n) wider *= 2;
    uint8_t *more = wider > OUT_MOST ? NULL : realloc(out, wider);
    if (!more) { lost("its other end does not read"); return; }
    out = more;
    out_cap = wider;
  }
  memcpy(out + out_used, p, n);
  out_used += n;
}

void mux_send(struct buf *b) {
  size_t n = frame_end(b);
  if (n) put(b->data, n);
  flush();
}

static void note(uint8_t type, uint32_t id, uint64_t bytes) {
  uint8_t space[64];
  struct buf b = {.data = space, .cap = sizeof space};
  frame_begin(&b, type, 0, id);
  if (bytes) frame_u64(&b, T_BYTES, bytes);
  mux_send(&b);
}

void mux_flush(int ms) {
  struct pollfd p = {.fd = channel.fd, .events = POLLOUT};
  while (out_used && channel.fd >= 0 && poll(&p, 1, ms) > 0) flush();
}

void mux_quiet(int on) {
  quiet = on;
  flush();
}

int mux_is_quiet(void) { return quiet; }

void mux_restart(void) {
  out_at = out_used = 0;
  for (struct flow *w = flows; w; w = w->next) {
    w->credit = FLOW_WINDOW - (w->used - w->at);
    w->taken = 0;
    if (w->sends) loop_want(&w->src, EPOLLIN);
  }
  mux_quiet(0);
}

// flows ---------------------------------------------------------------------------------------------------------------------------------

struct flow *flow_find(uint32_t id) {
  struct flow *w = flows;
  while (w && w->id != id) w = w->next;
  return w;
}

static int add(uint32_t id, int fd, int sends) {
  struct flow *w = nflows < FLOWS_MOST && fd >= 0 ? calloc(1, sizeof *w) : NULL;
  if (!w || set_blocking(fd, 0)) {
    free(w);
    close_fd(&fd);
    return -1;
  }
  *w = (struct flow){.src = {.on = on_flow, .fd = fd}, .next = flows, .id = id, .sends = (uint8_t)sends, .credit = FLOW_WINDOW};
  flows = w;
  nflows++;
  if (sends) loop_want(&w->src, EPOLLIN);
  return 0;
}

int flow_send(uint32_t id, int fd) { return add(id, fd, 1); }

int flow_receive(uint32_t id, int fd) { return add(id, fd, 0); }

// Its descriptor may have copies that stay open: a socket's other end hears of the end all the same.
static void drop(struct flow *w) {
  uint32_t id = w->id;
  int watched = w->watched;
  for (struct flow **p = &flows; *p; p = &(*p)->next)
    if (*p == w) { *p = w->next; break; }
  if (!w->sends && w->src.fd >= 0) shutdown(w->src.fd, SHUT_WR);
  loop_close(&w->src);
  free(w->kept);
  loop_free(w);
  nflows--;
  if (watched) mux_user->told(id);
}

static int owes(const struct flow *w) { return w->sends ? w->owed > 0 : w->used > w->at; }

int flow_owes(uint32_t id) {
  struct flow *w = flow_find(id);
  if (!w || !owes(w)) return 0;
  w->watched = 1;
  return 1;
}

static void settle(struct flow *w) {
  if (!w->watched || owes(w)) return;
  w->watched = 0;
  mux_user->told(w->id);
}

void flow_end(uint32_t id) {
  struct flow *w = flow_find(id);
  if (!w) return;
  note(w->sends ? H_EOF : H_CLOSED, id, 0);
  w->watched = 0;
  drop(w);
}

static void send_some(struct flow *w) {
  if (!w->credit || quiet || out_used - out_at > OUT_HIGH) {
    held |= w->credit > 0;
    loop_want(&w->src, 0);
    return;
  }
  size_t most = w->credit < PIECE ? (size_t)w->credit : PIECE;
  ssize_t n = read(w->src.fd, data.bytes, most);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {                        // EIO: the last user of a terminal is gone
    note(H_EOF, w->id, 0);
    drop(w);
    return;
  }
  w->credit -= (uint64_t)n;
  w->owed -= (uint64_t)n < w->owed ? (uint64_t)n : w->owed;
  data.head = (struct frame){.length = (uint32_t)(AFTER_LENGTH + (size_t)n), .type = H_DATA, .request = w->id};
  put(&data, sizeof data.head + (size_t)n);
  flush();
  settle(w);
}

static void taken(struct flow *w, size_t n) {
  w->taken += n;
  w->credit += n;
  if (w->taken < FLOW_WINDOW / 4 && w->used > w->at) return;
  note(H_WINDOW, w->id, w->taken);
  w->taken = 0;
}

static void write_kept(struct flow *w) {
  while (w->at < w->used) {
    ssize_t n = write(w->src.fd, w->kept + w->at, w->used - w->at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) { loop_want(&w->src, EPOLLOUT); return; }
    if (n <= 0) { note(H_CLOSED, w->id, 0); drop(w); return; }
    w->at += (size_t)n;
    taken(w, (size_t)n);
  }
  w->at = w->used = 0;
  loop_want(&w->src, 0);
  if (w->eof) drop(w);
  else settle(w);
}

static void on_flow(struct source *src, uint32_t events) {
  (void)events;
  struct flow *w = OWNER(src, struct flow, src);
  if (w->sends) send_some(w);
  else write_kept(w);
}

static int arrived(struct flow *w, const uint8_t *p, size_t n) {
  if (n > w->credit) return -1;        // beyond its window
  w->credit -= n;
  if (w->at == w->used) {
    ssize_t r;
    do r = write(w->src.fd, p, n); while (r < 0 && errno == EINTR);
    if (r < 0 && errno != EAGAIN) { note(H_CLOSED, w->id, 0); drop(w); return 0; }
    if (r > 0) { p += r; n -= (size_t)r; taken(w, (size_t)r); }
    if (!n) return 0;
  }
  if (!w->kept && !(w->kept = malloc(FLOW_WINDOW))) return -1;
  if (w->at) {
    memmove(w->kept, w->kept + w->at, w->used - w->at);
    w->used -= w->at;
    w->at = 0;
  }
  memcpy(w->kept + w->used, p, n);     // fits: what is kept and what the window allows are FLOW_WINDOW together
  w->used += n;
  loop_want(&w->src, EPOLLOUT);
  return 0;
}

// in ------------------------------------------------------------------------------------------------------------------------------------

static int about_flow(uint8_t type, uint32_t id, const uint8_t *payload, size_t size) {
  struct flow *w = flow_find(id);
  struct cursor c = {payload, payload + size};
  struct item i;
  uint64_t bytes = 0;
  if (!w) return 0;                    // it ended while this was under way
  switch (type) {
    case H_DATA: return w->sends ? -1 : arrived(w, payload, size);
    case H_EOF:
      if (w->sends) return -1;
      w->eof = 1;
      if (w->at == w->used) drop(w);
      return 0;
    case H_CLOSED:
      if (!w->sends) return -1;
      w->owed = 0;
      drop(w);
      return 0;
    default:                           // H_WINDOW
      if (!w->sends || field_next(&c, &i) != 1 || i.tag != T_BYTES || field_u64(&i, &bytes) || bytes > FLOW_WINDOW - w->credit) return -1;
      w->credit += bytes;
      loop_want(&w->src, EPOLLIN);
      return 0;
  }
}

static void handle(void) {
  size_t size = head.length - AFTER_LENGTH;
  head_got = in_got = 0;
  if (head.type < H_DATA || head.type > H_CLOSED) mux_user->frame(head.type, head.request, in, size);
  else if (about_flow(head.type, head.request, in, size)) lost("its other end broke the rules");
}

// 1: a frame or a part of one came
static int read_some(void) {
  int in_head = head_got < sizeof head;
  uint8_t *to = in_head ? (uint8_t *)&head + head_got : in + in_got;
  size_t left = in_head ? sizeof head - head_got : head.length - AFTER_LENGTH - in_got;
  if (left) {
    ssize_t n = read(channel.fd, to, left);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return 0;
    if (!n && in_head && !head_got && mux_user->alone && mux_user->alone()) return 0;
    if (n <= 0) { lost(n ? strerror(errno) : "its other end is gone"); return 0; }
    if (in_head) head_got += (size_t)n;
    else in_got += (size_t)n;
    if ((size_t)n < left) return 1;
  }
  if (in_head) {
    if (head.zero || head.length < AFTER_LENGTH || head.length - AFTER_LENGTH > WIRE_MAX) { lost("its other end sent no frame"); return 0; }
    if (head.length > AFTER_LENGTH) return 1;
  }
  handle();
  return channel.fd >= 0;
}

static void on_channel(struct source *src, uint32_t events) {
  if (events & EPOLLOUT) flush();
  for (int i = 0; i < 64 && src->fd >= 0 && read_some(); i++) {}
}

int mux_wait(int ms) {
  struct pollfd p = {.fd = channel.fd, .events = (short)(POLLIN | (out_used ? POLLOUT : 0))};
  if (channel.fd < 0 || poll(&p, 1, ms) <= 0) return 0;
  on_channel(&channel, (p.revents & POLLOUT ? EPOLLOUT : 0) | EPOLLIN);
  return 1;
}

int mux_open(int fd) {
  channel = (struct source){.on = on_channel, .fd = fd};
  head_got = in_got = out_at = out_used = 0;
  if (set_blocking(fd, 0)) return -1;
  loop_want(&channel, EPOLLIN);
  return 0;
}
