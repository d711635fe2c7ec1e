// The worker's loop and its one connection. It has one client, the edge that had it made; when that goes, the worker goes.
#include "fncall.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "util.h"

#define POLLS (8 + 5 * FN_BOXES)
#define ACCEPT_MS 30000                // for the edge to come
#define OUT_MOST (1ull << 30)          // replies that wait for the edge to read
#define SPARE_PAUSE_NS 1000000000ull   // after a box could not be made ahead

static struct sandbox *self;
static int conn = -1;
static uint8_t *in, *out;
static size_t in_used, out_at, out_used, out_cap;
static uint32_t starting;              // request that waits for the interpreter

uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void __attribute__((noreturn)) leave(int status) {
  calls_cancel_all();
  while (calls_boxes()) {
    calls_serve(NULL, 0);
    calls_cancel_all();                // what was made meanwhile
    nap_us(500);
  }
  sandbox_kill(self);
  sandbox_remove(self);
  _exit(status);
}

// ---- replies ------------------------------------------------------------------------------------------------------------------------------

static void flush(void) {
  while (out_at < out_used) {
    ssize_t n = send(conn, out + out_at, out_used - out_at, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) leave(0);
    out_at += (size_t)n;
  }
  out_at = out_used = 0;
}

static void queue(const void *p, size_t n) {
  if (out_used + n > out_cap) {
    size_t wider = (out_used + n) * 2 < OUT_MOST ? (out_used + n) * 2 : OUT_MOST;
    uint8_t *to = out_used + n <= wider ? realloc(out, wider) : NULL;
    if (!to) {
      fprintf(stderr, "aether %s: %zu bytes of results wait for the edge\n", self->spec.id, out_used);
      leave(1);
    }
    out = to;
    out_cap = wider;
  }
  memcpy(out + out_used, p, n);
  out_used += n;
}

void reply_frame(struct buf *b) {
  size_t n = frame_end(b);
  if (n) queue(b->data, n);
}

void reply_data(uint32_t request, uint8_t which, const uint8_t *p, size_t n) {
  for (uint64_t at = 0; at < n;) {
    size_t part = n - at < WIRE_DATA ? n - at : WIRE_DATA;
    struct frame h = {.length = (uint32_t)(sizeof h - 4 + 8 + part), .type = F_DATA, .flags = which, .request = request};
    queue(&h, sizeof h);
    queue(&at, sizeof at);
    queue(p + at, part);
    at += part;
  }
}

static void simple(uint8_t type, uint32_t request) {
  uint8_t space[64];
  struct buf b = {.data = space, .cap = sizeof space};
  frame_begin(&b, type, 0, request);
  reply_frame(&b);
}

void reply_fault(uint32_t request, const struct fault *f) {
  uint8_t space[1024];
  struct buf b = {.data = space, .cap = sizeof space};
  frame_begin(&b, F_ERROR, 0, request);
  frame_text(&b, T_CODE, f->code ? f->code : "internal");
  frame_text(&b, T_MESSAGE, f->message);
  frame_u64(&b, T_ERRNO, (uint64_t)f->err);
  if (f->resource) frame_text(&b, T_RESOURCE, f->resource);
  reply_frame(&b);
}

static void hello(void) {
  uint8_t space[256];
  struct buf b = {.data = space, .cap = sizeof space};
  frame_begin(&b, F_HELLO, 0, 0);
  frame_u64(&b, T_VERSION_MAJOR, WIRE_MAJOR);
  frame_u64(&b, T_VERSION_MINOR, WIRE_MINOR);
  frame_text(&b, T_ID, self->spec.id);
  reply_frame(&b);
}

// ---- requests -------------------------------------------------------------------------------------------------------------------------------

// EXEC: the interpreter that stays. OK when it is ready for calls.
static int interpreter(uint32_t request, struct cursor c, struct fault *f) {
  static const char *argv[FN_ARGS + 1], *env[MAX_ENV + 1];
  struct item i;
  int argc = 0, envc = 0, more;
  if (zygote_socket() >= 0 || starting) return fault_set(f, "invalid_request", 0, "there is an interpreter");
  while ((more = field_next(&c, &i)) > 0) {
    int bad = i.tag == T_ARG && argc < FN_ARGS ? field_text(&i, &argv[argc++]) : i.tag == T_ENV && envc < MAX_ENV ? field_text(&i, &env[envc++]) : -1;
    if (bad) return fault_set(f, "wire_field", 0, "field %u of the interpreter", i.tag);
  }
  if (more < 0 || !argc) return fault_set(f, "wire_field", 0, "the interpreter's start is malformed");
  argv[argc] = env[envc] = NULL;
  if (zygote_start(self, argv, env, f)) return -1;
  starting = request;
  return 0;
}

// PUT, DROP: ID and, for PUT, bytes to append.
static int shared(uint8_t type, struct cursor c, struct fault *f) {
  struct item i, bytes = {0};
  const char *id = NULL;
  while (field_next(&c, &i) > 0) {
    if (i.tag == T_ID && field_text(&i, &id)) id = NULL;
    if (i.tag == T_BYTES) bytes = i;
  }
  if (!id) return fault_set(f, "wire_field", 0, "a shared file without an id");
  if (type == F_FN_PUT) return shared_add(id, bytes.p, bytes.size, f);
  shared_drop(id);
  return 0;
}

static void serve(const struct frame *h, const uint8_t *p, size_t n) {
  struct fault f = {0};
  struct cursor c = {p, p + n};
  int bad = 0;
  switch (h->type) {
    case F_HELLO: hello(); return;
    case F_EXEC:
      if (!(bad = interpreter(h->request, c, &f))) return;
      break;
    case F_FN_CALL:
      if (!(bad = call_begin(h->request, p, n, &f))) return;
      break;
    case F_FN_CANCEL: call_cancel(h->request); return;
    case F_FN_PUT: case F_FN_DROP: bad = shared(h->type, c, &f); break;
    case F_STOP: leave(0);
    default: bad = fault_set(&f, "wire_field", 0, "a worker knows no request of type %u", h->type);
  }
  if (bad) reply_fault(h->request, &f);
  else simple(F_OK, h->request);
}

static void receive(void) {
  ssize_t n = recv(conn, in + in_used, sizeof(struct frame) + WIRE_MAX - in_used, 0);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (n <= 0) leave(0);
  in_used += (size_t)n;
  size_t at = 0;
  struct frame h;
  while (in_used - at >= sizeof h) {
    memcpy(&h, in + at, sizeof h);
    size_t whole = (size_t)h.length + 4;
    if (h.zero || whole < sizeof h || whole > sizeof h + WIRE_MAX) leave(1);
    if (in_used - at < whole) break;
    serve(&h, in + at + sizeof h, whole - sizeof h);
    at += whole;
  }
  memmove(in, in + at, in_used - at);
  in_used -= at;
}

static void zygote_spoke(void) {
  struct fault f = {0};
  uint64_t serial, rss;
  int status, what;
  while ((what = zygote_hear(&serial, &status, &rss, &f)) > 0) {
    if (what == 1) calls_zygote(serial, status, rss);
    else if (starting) {
      simple(F_OK, starting);
      starting = 0;
    }
  }
  if (!what) return;
  // without it this worker is of no use: the edge makes another one
  reply_fault(starting, &f);
  flush();
  leave(1);
}

static int take_client(void) {
  struct pollfd p = {.fd = self->listen_fd, .events = POLLIN};
  if (poll(&p, 1, ACCEPT_MS) <= 0) return -1;
  return accept4(self->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

void fncall_main(struct sandbox *s) {
  char path[4200];
  struct fault f = {0};
  uint64_t spare_after = 0;
  self = s;
  prctl(PR_SET_NAME, "aether", 0, 0, 0);
  signal(SIGPIPE, SIG_IGN);
  snprintf(path, sizeof path, "%s/" FN_MARK, s->spec.run_dir);
  int mark = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  in = malloc(sizeof(struct frame) + WIRE_MAX);
  if (mark < 0 || !in || fnbox_open(s, &f) || calls_open(s) || (conn = take_client()) < 0) {
    fprintf(stderr, "aether %s: %s\n", s->spec.id, f.code ? f.message : strerror(errno));
    leave(1);
  }
  close(mark);
  for (;;) {
    struct pollfd p[POLLS] = {{.fd = conn, .events = POLLIN | (out_used ? POLLOUT : 0)}, {.fd = s->init_fd, .events = POLLIN},
                              {.fd = zygote_socket(), .events = POLLIN}};
    uint64_t now = now_ns(), wake = UINT64_MAX;
    int n = 3 + calls_poll(p + 3, POLLS - 3, &wake);
    int ahead = now >= spare_after && !starting;
    int ready = poll(p, (nfds_t)n, ahead ? 0 : wake == UINT64_MAX ? -1 : wake > now ? (int)((wake - now + 999999) / 1000000) : 0);
    if (!ready && ahead) {             // nobody wants anything right now
      int made = calls_spare();
      if (made > 0) continue;
      spare_after = made < 0 ? now + SPARE_PAUSE_NS : UINT64_MAX;
      continue;
    }
    if (ready > 0) {
      if (p[2].revents) zygote_spoke();
      calls_serve(p + 3, n - 3);
      if (p[0].revents & ~POLLOUT) receive();
      if (p[1].revents) {
        fprintf(stderr, "aether %s: PID 1 of the container died\n", s->spec.id);
        leave(1);
      }
      if (spare_after == UINT64_MAX) spare_after = 0;
    } else if (spare_after != UINT64_MAX && wake == UINT64_MAX) spare_after = 0;
    calls_tick();
    flush();
  }
}
