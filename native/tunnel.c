// CONNECT: a connection that becomes the bytes of a TCP port inside. aether lives in the sandbox's network namespace, so this is one
// connect(2) to its loopback; the socket stays here and the program inside sees an ordinary client. What it sends is passed on unread.
#include "aether.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_NS (5000 * MS)         // a backlog that stays full for so long
#define LINGER_NS (60000 * MS)         // of one whose client or port is gone and whose other side has not said its last
#define PIECE (256u << 10)
#define PIECES_PER_TURN 4              // then others get their turn

struct way { struct source *from, *to; uint8_t *kept; size_t at, n; uint8_t ended, told; }; // ended: no more comes; told: `to` knows
struct tunnel {
  struct source client, port;
  struct tunnel *next;
  struct way in, out;                  // to the port, to the client
  uint32_t request;
  uint16_t number;
  uint8_t six, open, deaf;             // six: it is tried by IPv6; open: the port answered; deaf: it takes nothing any more
  uint64_t deadline;
};
static struct tunnel *tunnels;
static int tunnels_n;
static uint8_t piece[PIECE];

static void tunnel_close(struct tunnel *t) {
  for (struct tunnel **p = &tunnels; *p; p = &(*p)->next)
    if (*p == t) { *p = t->next; break; }
  tunnels_n--;
  loop_close(&t->client);
  loop_close(&t->port);
  free(t->in.kept);
  free(t->out.kept);
  loop_free(t);
}

// Before the port answered nothing but a frame fits here, and the client's socket is empty.
static void refuse(struct tunnel *t, const char *code, int err, const char *why) {
  struct buf b = reply_buf();
  char message[120];
  snprintf(message, sizeof message, "port %u of sandbox %.40s: %s", t->number, A.s->spec.id, why);
  frame_begin(&b, F_ERROR, 0, t->request);
  frame_text(&b, T_CODE, code);
  frame_text(&b, T_MESSAGE, message);
  if (err) frame_u64(&b, T_ERRNO, (uint64_t)err);
  size_t n = frame_end(&b);
  (void)!send(t->client.fd, b.data, n, MSG_NOSIGNAL | MSG_DONTWAIT);
  tunnel_close(t);
}

// bytes ------------------------------------------------------------------------------------------------------------------------------

// What `to` took of n bytes at p; -1: it is gone
static ssize_t give(int fd, const uint8_t *p, size_t n) {
  size_t done = 0;
  while (done < n) {
    ssize_t r = send(fd, p + done, n - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (r >= 0) done += (size_t)r;
    else if (errno == EAGAIN) break;
    else if (errno != EINTR) return -1;
  }
  return (ssize_t)done;
}

enum { MOVED = 1, NOT_NOW = 0, FROM_BROKE = -1, TO_BROKE = -2 };
static int carry(struct way *w) {
  if (w->n) {
    ssize_t took = give(w->to->fd, w->kept + w->at, w->n);
    if (took < 0) return TO_BROKE;
    w->at += (size_t)took;
    w->n -= (size_t)took;
    if (w->n) return took > 0 ? MOVED : NOT_NOW;
    free(w->kept);
    w->kept = NULL;
  }
  if (w->ended) {
    if (!w->told) shutdown(w->to->fd, SHUT_WR);
    w->told = 1;
    return NOT_NOW;
  }
  ssize_t n;
  do n = recv(w->from->fd, piece, PIECE, MSG_DONTWAIT); while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN ? NOT_NOW : FROM_BROKE;
  if (!n) { w->ended = 1; return carry(w); }
  ssize_t took = give(w->to->fd, piece, (size_t)n);
  if (took < 0) return TO_BROKE;
  if (took == n) return MOVED;
  w->n = (size_t)(n - took);
  w->at = 0;
  w->kept = malloc(w->n);
  if (!w->kept) return FROM_BROKE;
  memcpy(w->kept, piece + took, w->n);
  return MOVED;
}

// What a client still sends to a port that broke is dropped, or its next write would fail before it has read what the port had said.
static int drop(struct way *w) {
  ssize_t n = recv(w->from->fd, piece, PIECE, MSG_DONTWAIT);
  if (n > 0) return MOVED;
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return NOT_NOW;
  w->ended = w->told = 1;
  return NOT_NOW;
}

static void linger(struct tunnel *t) {
  if (t->deadline != NEVER) return;
  t->deadline = A.now + LINGER_NS;
  timer_want(t->deadline);
}

static void port_broke(struct tunnel *t) {
  t->deaf = 1;
  t->in.n = 0;
  linger(t);
}

static void want(struct source *src, const struct way *from, const struct way *to) {
  uint32_t events = 0;
  if (!from->ended && !from->n) events |= EPOLLIN;
  if (to->n) events |= EPOLLOUT;
  loop_want(src, events ? events : EPOLLRDHUP | EPOLLET);        // its end is noticed, without spinning on it
}

static void pass(struct tunnel *t, int client) {
  int moved = 0, in = MOVED, out = MOVED;
  for (int i = 0; i < PIECES_PER_TURN && (in > 0 || out > 0); i++) {
    if (in > 0) in = t->deaf ? drop(&t->in) : carry(&t->in);
    if (in == TO_BROKE) { port_broke(t); in = MOVED; }
    if (out > 0) out = carry(&t->out);
    if (out == FROM_BROKE) { port_broke(t); t->out.ended = 1; out = carry(&t->out); }
    if (in < 0 || out < 0 || (t->in.told && t->out.told)) { tunnel_close(t); return; }
    moved |= in > 0 || out > 0;
    if (in > 0 && client && A.paused) { pause_end(); reclaim_stop(); }
  }
  if (moved) { touch(); idle_again(); }
  want(&t->client, &t->in, &t->out);
  want(&t->port, &t->out, &t->in);
}

static void on_client(struct source *src, uint32_t events) {
  struct tunnel *t = OWNER(src, struct tunnel, client);
  if (events & EPOLLHUP) linger(t);    // nobody will read: what is on its way in still goes in
  pass(t, 1);
}

// the connection ---------------------------------------------------------------------------------------------------------------------

static void on_port(struct source *src, uint32_t events);

// 0: under way, -1: refused, or impossible
static int try(struct tunnel *t) {
  struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(t->number), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(t->number), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  const struct sockaddr *to = t->six ? (const void *)&six : (const void *)&four;
  int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
  if (fd < 0) return -1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (connect(fd, to, t->six ? sizeof six : sizeof four) && errno != EINPROGRESS) {
    int err = errno;
    close(fd);
    errno = err;
    return -1;
  }
  t->port = (struct source){.on = on_port, .fd = fd};
  loop_want(&t->port, EPOLLOUT);
  return 0;
}

static void answered(struct tunnel *t, int err) {
  if (!err) {
    struct buf b = reply_buf();
    frame_begin(&b, F_OK, 0, t->request);
    size_t n = frame_end(&b);
    if (give(t->client.fd, b.data, n) != (ssize_t)n) { tunnel_close(t); return; }
    t->open = 1;
    t->deadline = NEVER;
    pass(t, 1);
    return;
  }
  if (!t->six) {                       // a program may listen on one of the two alone
    loop_close(&t->port);
    t->six = 1;
    if (!try(t)) return;
    if (errno != ECONNREFUSED && errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL) err = errno;
  }
  if (err == ECONNREFUSED) refuse(t, "port_closed", 0, "nothing listens");
  else refuse(t, err == ETIMEDOUT ? "port_closed" : "resource_exhausted", err, strerror(err));
}

static void on_port(struct source *src, uint32_t events) {
  (void)events;
  struct tunnel *t = OWNER(src, struct tunnel, port);
  int err = 0;
  socklen_t n = sizeof err;
  if (t->open) pass(t, 0);
  else answered(t, getsockopt(src->fd, SOL_SOCKET, SO_ERROR, &err, &n) ? errno : err);
}

void tunnel_start(struct conn *c, const struct request *r) {
  if (r->port < 1 || r->port > 65535) { conn_error(c, r->id, "invalid_request", 0, "CONNECT: a port is 1 to 65535"); return; }
  struct tunnel *t = tunnels_n < MAX_TUNNELS ? calloc(1, sizeof *t) : NULL;
  if (!t) {
    conn_error(c, r->id, "resource_exhausted", 0, "%d connections to ports of sandbox %s are open", tunnels_n, A.s->spec.id);
    return;
  }
  *t = (struct tunnel){.client = {.on = on_client, .fd = c->src.fd}, .port = {.fd = -1}, .next = tunnels, .request = r->id,
                       .number = (uint16_t)r->port, .deadline = A.now + CONNECT_NS};
  t->in = (struct way){.from = &t->client, .to = &t->port};
  t->out = (struct way){.from = &t->port, .to = &t->client};
  loop_want(&c->src, 0);
  c->src.fd = -1;
  conn_close(c);                       // the tunnel has the socket now
  tunnels = t;
  tunnels_n++;
  timer_want(t->deadline);
  if (try(t)) answered(t, errno);
}

uint64_t tunnels_tick(void) {
  uint64_t next = NEVER;
  for (struct tunnel *t = tunnels, *following; t; t = following) {
    following = t->next;
    if (A.now < t->deadline) { if (t->deadline < next) next = t->deadline; }
    else if (t->open) tunnel_close(t);
    else refuse(t, "port_closed", ETIMEDOUT, "it does not answer");
  }
  return next;
}
