// Connections: whole frames in, read exactly (FILE and CONNECT hand their socket over, so no byte behind the frame may be taken);
// bytes out, with what the socket does not take kept and bounded.
#include "aether.h"
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define AFTER_LENGTH (sizeof(struct frame) - sizeof(uint32_t))
#define FRAMES_PER_TURN 8              // of one connection, then others get their turn
#define PUMPS_PER_TURN 8
#define IN_KEPT (16u << 10)            // a payload buffer above this goes back when small frames follow
#define SEND_BUFFER (1 << 20)          // so that one DATA frame fits and is not copied

struct conn *conns;
static struct source listener;
static struct conn *pumps;             // connections with something to produce
static uint8_t reply_space[64 << 10];

struct buf reply_buf(void) { return (struct buf){.data = reply_space, .cap = sizeof reply_space}; }

int conn_full(const struct conn *c) { return c->closed || c->out_used > c->out_at; }

static void want(struct conn *c) {
  if (c->closed) return;
  uint32_t events = 0;
  if (!c->feeding && !c->held && !c->last) events |= EPOLLIN;
  if (conn_full(c)) events |= EPOLLOUT;
  // a connection that is not read and has nothing to send still has to notice its peer's end, without spinning on it
  loop_want(&c->src, events ? events : EPOLLRDHUP | EPOLLET);
}

// out --------------------------------------------------------------------------------------------------------------------------------

static void keep(struct conn *c, const uint8_t *p, size_t n) {
  size_t have = c->out_used - c->out_at;
  if (have + n > QUEUE_MAX + WIRE_MAX) { conn_close(c); return; }  // it asks and does not read
  if (c->out_at) {
    memmove(c->out, c->out + c->out_at, have);
    c->out_at = 0;
    c->out_used = have;
  }
  if (have + n > c->out_cap) {
    size_t wider = c->out_cap ? c->out_cap : 4096;
    while (wider < have + n) wider *= 2;
    uint8_t *more = realloc(c->out, wider);
    if (!more) { conn_close(c); return; }
    c->out = more;
    c->out_cap = wider;
  }
  memcpy(c->out + have, p, n);
  c->out_used = have + n;
}

void conn_send(struct conn *c, const void *p, size_t n) {
  if (c->closed) return;
  size_t done = 0;
  while (!conn_full(c) && done < n) {
    ssize_t r = send(c->src.fd, (const uint8_t *)p + done, n - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (r >= 0) { done += (size_t)r; continue; }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) break;
    conn_close(c);
    return;
  }
  if (done < n) keep(c, (const uint8_t *)p + done, n - done);
  want(c);
}

void conn_reply(struct conn *c, struct buf *b) {
  size_t n = frame_end(b);
  if (n) conn_send(c, b->data, n);
  else { fprintf(stderr, "aether %s: a reply does not fit its buffer\n", A.s->spec.id); conn_close(c); }
}

void conn_ok(struct conn *c, uint32_t request) {
  struct buf b = reply_buf();
  frame_begin(&b, F_OK, 0, request);
  conn_reply(c, &b);
}

void conn_error(struct conn *c, uint32_t request, const char *code, int err, const char *format, ...) {
  char message[400];
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
  struct buf b = reply_buf();
  frame_begin(&b, F_ERROR, 0, request);
  frame_text(&b, T_CODE, code);
  frame_text(&b, T_MESSAGE, message);
  if (err) frame_u64(&b, T_ERRNO, (uint64_t)err);
  conn_reply(c, &b);
}

static void flush(struct conn *c) {
  while (conn_full(c)) {
    ssize_t r = send(c->src.fd, c->out + c->out_at, c->out_used - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (r >= 0) { c->out_at += (size_t)r; continue; }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return;
    conn_close(c);
    return;
  }
  c->out_at = c->out_used = 0;
  if (c->out_cap > IN_KEPT && !c->subs) { free(c->out); c->out = NULL; c->out_cap = 0; }
}

int conn_flush(struct conn *c, int wait_ms) {
  while (!c->closed && conn_full(c)) {
    struct pollfd p = {.fd = c->src.fd, .events = POLLOUT};
    if (poll(&p, 1, wait_ms) <= 0) return -1;
    flush(c);
  }
  return 0;
}

int asker_add(struct asker **list, struct conn *c, uint32_t request) {
  struct asker *a = malloc(sizeof *a);
  if (!a) return -1;
  *a = (struct asker){*list, c, request};
  *list = a;
  return 0;
}

int asker_next(struct asker **list, struct asker *a) {
  struct asker *first = *list;
  if (!first) return 0;
  *a = *first;
  *list = first->next;
  free(first);
  return 1;
}

void asker_forget(struct asker *list, const struct conn *c) {
  for (; list; list = list->next)
    if (list->conn == c) list->conn = NULL;
}

// subs -------------------------------------------------------------------------------------------------------------------------------

struct sub *sub_new(struct conn *c, struct command *cmd, uint32_t request, int kind) {
  struct sub *s = c->nsubs < MAX_SUBS ? calloc(1, sizeof *s) : NULL;
  if (!s) { conn_close(c); return NULL; }
  c->nsubs++;
  s->conn = c;
  s->cmd = cmd;
  s->request = request;
  s->kind = (uint8_t)kind;
  struct sub **p = &c->subs;
  while (*p) p = &(*p)->next;          // in the order of the requests
  *p = s;
  if (cmd) {
    s->next_of_command = cmd->subs;
    cmd->subs = s;
    command_ref(cmd);
  }
  return s;
}

static void sub_drop(struct sub *s) {
  struct conn *c = s->conn;
  for (struct sub **p = &c->subs; *p; p = &(*p)->next)
    if (*p == s) { *p = s->next; break; }
  c->nsubs--;
  struct command *cmd = s->cmd;
  if (cmd) {
    for (struct sub **p = &cmd->subs; *p; p = &(*p)->next_of_command)
      if (*p == s) { *p = s->next_of_command; break; }
    if (s->kind == SUB_STREAM)         // its back-pressure goes with it
      channels_resume(cmd);
    command_unref(cmd);
  }
  if (s->kind == SUB_STREAM || s->kind == SUB_ATTACH) touch();
  free(s);
}

void conn_pump_soon(struct conn *c) {
  if (c->pumping || c->closed || conn_full(c)) return;
  c->pumping = 1;
  c->next_pump = pumps;
  pumps = c;
}

void subs_wake(struct command *cmd) {
  for (struct sub *s = cmd->subs; s; s = s->next_of_command) conn_pump_soon(s->conn);
}

void subs_started(struct command *cmd) {
  for (struct sub *s = cmd->subs, *next; s; s = next) {
    next = s->next_of_command;
    if (!s->announce) continue;
    struct conn *c = s->conn;
    uint32_t request = s->request;
    s->announce = 0;
    if (s->kind == SUB_START) sub_drop(s);
    command_started(c, request, cmd);
    conn_pump_soon(c);
    next = cmd->subs;                  // a reply that cannot be sent closes the connection, with all its subs
  }
}

void subs_failed(struct command *cmd, const struct fault *f) {
  while (cmd->subs) {
    struct conn *c = cmd->subs->conn;
    uint32_t request = cmd->subs->request;
    sub_drop(cmd->subs);
    conn_error(c, request, f->code, f->err, "%s", f->message);
  }
}

int conns_waiting(void) { return pumps != NULL; }

static void pump(struct conn *c) {
  for (struct sub *s = c->subs, *next; s && !c->closed; s = next) {
    next = s->next;
    for (int i = 0; i < PUMPS_PER_TURN && !conn_full(c); i++) {
      int more = sub_pump(s);
      if (c->closed) return;           // its subs are gone
      if (more < 0) { sub_drop(s); break; }
      if (!more) break;
      if (i == PUMPS_PER_TURN - 1) conn_pump_soon(c);
    }
    if (conn_full(c)) return;          // it comes back when the socket took it all
  }
}

void conns_pump(void) {
  struct conn *list = pumps;
  pumps = NULL;
  while (list) {
    struct conn *c = list;
    list = c->next_pump;
    c->pumping = 0;
    if (!c->closed) pump(c);
  }
}

// in ---------------------------------------------------------------------------------------------------------------------------------

static void handle(struct conn *c) {
  size_t size = c->head.length - AFTER_LENGTH;
  c->head_got = c->in_got = 0;
  request_handle(c, c->head.type, c->head.request, c->in, size);
}

// 1: more may be there, 0: not now
static int read_some(struct conn *c) {
  int in_head = c->head_got < sizeof c->head;
  uint8_t *to = in_head ? (uint8_t *)&c->head + c->head_got : c->in + c->in_got;
  size_t left = in_head ? sizeof c->head - c->head_got : c->head.length - AFTER_LENGTH - c->in_got;
  if (left) {
    ssize_t r = recv(c->src.fd, to, left, MSG_DONTWAIT);
    if (r < 0 && errno == EINTR) return 1;
    if (r < 0 && errno == EAGAIN) return 0;
    if (r <= 0) { conn_close(c); return 0; }
    if (in_head) c->head_got += (size_t)r;
    else c->in_got += (size_t)r;
    if ((size_t)r < left) return 1;
  }
  if (in_head) {
    if (c->head.zero || c->head.length < AFTER_LENGTH || c->head.length - AFTER_LENGTH > WIRE_MAX) { conn_close(c); return 0; }
    size_t need = c->head.length - AFTER_LENGTH;
    if (need > c->in_cap || (c->in_cap > IN_KEPT && need <= IN_KEPT / 4)) {
      size_t cap = need < 1024 ? 1024 : need;
      free(c->in);
      c->in = malloc(cap);
      c->in_cap = c->in ? cap : 0;
      if (!c->in) { conn_close(c); return 0; }
    }
    if (need) return 1;
  }
  handle(c);
  return !c->closed && !c->feeding && !c->held && !c->last;
}

static void on_conn(struct source *src, uint32_t events) {
  struct conn *c = OWNER(src, struct conn, src);
  if (events & EPOLLOUT) {
    flush(c);
    if (c->closed) return;
    if (!conn_full(c)) {
      if (c->last) { conn_close(c); return; }
      if (c->held) {                   // a frame that waited
        c->held = 0;
        handle(c);
        if (c->closed) return;
      }
      for (struct sub *s = c->subs; s; s = s->next)
        if (s->kind == SUB_STREAM) channels_resume(s->cmd);
      conn_pump_soon(c);
    }
  }
  if (events & EPOLLIN && !c->feeding && !c->held && !c->last)
    for (int i = 0; i < 2 * FRAMES_PER_TURN && read_some(c); i++) {}
  else if (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP) && !(events & EPOLLIN)) {
    // the peer is gone; while its STDIN is being fed the bytes it sent still count, so only a dead socket ends that
    if ((!c->feeding && !c->held) || events & (EPOLLHUP | EPOLLERR)) conn_close(c);
  }
  want(c);
}

void conns_release(void) {
  for (struct conn *c = conns, *next; c; c = next) {
    next = c->next;
    if (!c->held || conn_full(c)) continue;
    c->held = 0;
    handle(c);
    want(c);
  }
}

void conn_fed(struct conn *c) {
  c->feeding = NULL;
  want(c);
}

static void unlink_conn(struct conn *c) {
  c->closed = 1;
  if (c->prev) c->prev->next = c->next;
  else conns = c->next;
  if (c->next) c->next->prev = c->prev;
  A.conns--;
  if (c->feeding) c->feeding->feeder = NULL;
  snapshots_forget(c);
  pause_forget(c);
  reclaim_forget(c);
  restore_forget(c);
  hold_forget(c);
  while (c->subs) sub_drop(c->subs);
  if (c->pumping)
    for (struct conn **p = &pumps; *p; p = &(*p)->next_pump)
      if (*p == c) { *p = c->next_pump; break; }
  free(c->out);
  c->out = NULL;
  c->out_used = c->out_at = 0;
  loop_free(c->in);                    // a handler may still read its request
  loop_free(c);
}

void conn_close(struct conn *c) {
  if (c->closed) return;
  loop_close(&c->src);
  unlink_conn(c);
}

// accept -----------------------------------------------------------------------------------------------------------------------------

static void on_listen(struct source *src, uint32_t events) {
  (void)events;
  for (int i = 0; i < 64; i++) {
    int fd = accept4(src->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) usleep(1000); // until a command ends
      return;
    }
    struct ucred peer;
    socklen_t n = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) || (peer.uid != 0 && peer.uid != geteuid())) { close(fd); continue; }
    int size = SEND_BUFFER;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size)) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    struct conn *c = calloc(1, sizeof *c);
    if (!c) { close(fd); continue; }
    c->src = (struct source){.on = on_conn, .fd = fd};
    c->next = conns;
    if (conns) conns->prev = c;
    conns = c;
    A.conns++;
    if (A.conns > MAX_CONNS) {
      conn_error(c, 0, "resource_exhausted", 0, "the supervisor of %s has %d connections", A.s->spec.id, MAX_CONNS);
      if (!c->closed) conn_close(c);
      continue;
    }
    want(c);
  }
}

int conn_listen(int fd) {
  listener = (struct source){.on = on_listen, .fd = fd};
  if (set_blocking(fd, 0)) return -1;
  loop_want(&listener, EPOLLIN);
  return 0;
}
