// The channel to a guest: flows keep their order and their windows, a reader that does not read stops nobody else, and a peer that breaks the
// rules loses the channel, never us.
#include "../mux.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(c) do { if (!(c)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c); exit(1); } } while (0)
#define ROUNDS 3000

static int frames, tells, losses;
static uint32_t told_of;
static void on_frame(uint8_t type, uint32_t request, const uint8_t *payload, size_t size) {
  (void)type; (void)request;
  struct cursor c = {payload, payload + size};
  struct item i;
  while (field_next(&c, &i) > 0) {}
  frames++;
}
static void on_told(uint32_t flow) { tells++; told_of = flow; }
static void on_lost(const char *why) { (void)why; losses++; }
static const struct mux_user user = {on_frame, on_told, on_lost, NULL};

// All that can be done without waiting.
static void turn(void) {
  struct epoll_event e[16];
  for (int n; (n = epoll_wait(A.epoll, e, 16, 0)) > 0;)
    for (int i = 0; i < n; i++) {
      struct source *src = e[i].data.ptr;
      if (src->fd >= 0 && src->events) src->on(src, e[i].events);
    }
  loop_collect();
}

static int peer;                       // its end of the channel

static void open_channel(void) {
  int ends[2];
  CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
  int size = 4 << 20;
  for (int i = 0; i < 2; i++) setsockopt(ends[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
  peer = ends[1];
  CHECK(!mux_open(ends[0]));
  frames = tells = losses = 0;
}

static void say(uint8_t type, uint32_t id, const void *p, size_t n) {
  struct frame h = {.length = (uint32_t)(sizeof h - sizeof h.length + n), .type = type, .request = id};
  CHECK(write(peer, &h, sizeof h) == sizeof h && (!n || write(peer, p, n) == (ssize_t)n));
}

static int hear(struct frame *h, uint8_t *payload, size_t cap) {
  if (recv(peer, h, sizeof *h, MSG_DONTWAIT) != sizeof *h) return 0;
  size_t n = h->length - (sizeof *h - sizeof h->length);
  CHECK(n <= cap && (!n || recv(peer, payload, n, MSG_WAITALL) == (ssize_t)n));
  return 1;
}

static void receives(void) {
  static uint8_t out[FLOW_WINDOW], back[FLOW_WINDOW];
  struct frame h;
  uint8_t payload[256];
  int slow[2], quick[2];
  uint64_t window = 0;
  open_channel();
  CHECK(!pipe(slow) && !pipe(quick) && fcntl(slow[1], F_SETPIPE_SZ, 4096) > 0);
  CHECK(!flow_receive(5, slow[1]) && !flow_receive(9, quick[1]));
  for (size_t i = 0; i < sizeof out; i++) out[i] = (uint8_t)(i * 7 + i / 4096);
  for (size_t at = 0; at < sizeof out; at += 32768) say(H_DATA, 5, out + at, 32768);
  say(H_DATA, 9, "quick", 5);
  turn();
  CHECK(!losses && read(quick[0], back, 5) == 5 && !memcmp(back, "quick", 5));
  CHECK(flow_owes(5) && !flow_owes(9));
  say(H_EOF, 5, NULL, 0);
  size_t got = 0;
  for (ssize_t n; turn(), (n = read(slow[0], back + got, sizeof back - got)) > 0;) got += (size_t)n;
  CHECK(got == sizeof out && !memcmp(out, back, got));
  CHECK(tells == 1 && told_of == 5 && !flow_find(5));
  while (hear(&h, payload, sizeof payload))
    if (h.type == H_WINDOW && h.request == 5) { uint64_t v; memcpy(&v, payload + 8, 8); window += v; }
  CHECK(window == FLOW_WINDOW);
  close(quick[0]);
  say(H_DATA, 9, "x", 1);
  turn();
  int closed = 0;
  while (hear(&h, payload, sizeof payload)) closed |= h.type == H_CLOSED && h.request == 9;
  CHECK(closed && !flow_find(9) && !losses);
  close(slow[0]);
  close(peer);
  turn();
  CHECK(losses == 1);
}

static void sends(void) {
  static uint8_t payload[64 << 10], big[FLOW_WINDOW];
  struct frame h;
  int in[2];
  size_t got = 0, total = 2 * FLOW_WINDOW;
  open_channel();
  CHECK(!pipe(in) && fcntl(in[1], F_SETPIPE_SZ, 1 << 20) >= (int)total);
  CHECK(!flow_send(6, in[0]) && write(in[1], big, sizeof big) == sizeof big && write(in[1], big, sizeof big) == sizeof big);
  flow_find(6)->owed = total;
  CHECK(flow_owes(6));
  turn();
  while (hear(&h, payload, sizeof payload)) got += h.length - 8;
  CHECK(got == FLOW_WINDOW && !tells);  // and not a byte more before the peer took some
  uint8_t field[16] = {T_BYTES, 0, 0, 0, 8, 0, 0, 0};
  uint64_t all = FLOW_WINDOW;
  memcpy(field + 8, &all, 8);
  say(H_WINDOW, 6, field, sizeof field);
  close(in[1]);
  turn();
  int end = 0;
  while (hear(&h, payload, sizeof payload)) got += h.length - 8;
  say(H_WINDOW, 6, field, sizeof field); // its end goes when there is room for something
  turn();
  while (hear(&h, payload, sizeof payload)) end |= h.type == H_EOF;
  CHECK(got == total && end && tells == 1 && !flow_find(6));
  close(peer);
  turn();
}

// What breaks the rules: more than the window, a window that was never given, data for a flow that sends, no frame at all.
static void rules(void) {
  static uint8_t big[32768];
  for (int kind = 0; kind < 4; kind++) {
    int in[2], out[2];
    uint8_t field[16] = {T_BYTES, 0, 0, 0, 8, 0, 0, 0, 1};
    open_channel();
    CHECK(!pipe(in) && !pipe(out) && !flow_send(4, in[0]) && !flow_receive(5, out[1]));
    if (kind == 0) for (int i = 0; i < 20; i++) say(H_DATA, 5, big, sizeof big);
    if (kind == 1) say(H_WINDOW, 4, field, sizeof field);
    if (kind == 2) say(H_DATA, 4, "x", 1);
    if (kind == 3) CHECK(write(peer, "\0\0\0\0\0\0\0\0\0\0\0\0", 12) == 12);
    turn();
    CHECK(losses == 1);
    flow_end(4);
    flow_end(5);
    close(in[1]);
    close(out[0]);
    close(peer);
  }
}

static void noise(void) {
  unsigned seed = 20261130;
  signal(SIGPIPE, SIG_IGN);
  for (int round = 0; round < ROUNDS; round++) {
    int out[2];
    uint8_t bytes[512];
    open_channel();
    CHECK(!pipe(out) && !flow_receive(5, out[1]));
    for (int i = 0; i < 4; i++) {
      size_t n = (size_t)rand_r(&seed) % 64;
      for (size_t k = 0; k < n; k++) bytes[k] = (uint8_t)rand_r(&seed);
      if (rand_r(&seed) & 1) say((uint8_t)(rand_r(&seed) % 24), (uint32_t)(rand_r(&seed) % 8), bytes, n); // a frame of nonsense, or none
      else if (n && write(peer, bytes, n) < 0) break;
      turn();
      if (losses) break;
    }
    flow_end(5);
    close(out[0]);
    close(peer);
    turn();
    CHECK(losses == 1);
  }
}

int main(void) {
  static struct sandbox s = {.spec = {.id = "test"}};
  A = (struct aether){.s = &s, .epoll = epoll_create1(0)};
  mux_user = &user;
  signal(SIGPIPE, SIG_IGN);
  receives();
  sends();
  rules();
  noise();
  return 0;
}
