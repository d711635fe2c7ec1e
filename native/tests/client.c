// A small blocking client of the supervisor wire, for tests and measurements.
#include "../frame.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function"                // a test needs some of it
#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

static uint8_t send_space[WIRE_MAX + 64], reply[WIRE_MAX + 64];
static struct frame reply_head;
static struct buf out = {.data = send_space, .cap = sizeof send_space};
static uint32_t last_request;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int get(int fd) { return frame_recv(fd, &reply_head, reply, sizeof reply) ? -1 : reply_head.type; }
static void begin(uint8_t type) { frame_begin(&out, type, 0, ++last_request); }
static void finish(int fd) { CHECK(!frame_send(fd, &out)); }

static int client(const char *dir) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", dir);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  CHECK(!connect(fd, (struct sockaddr *)&a, sizeof a));
  begin(F_HELLO);
  frame_u64(&out, T_VERSION_MAJOR, WIRE_MAJOR);
  frame_u64(&out, T_VERSION_MINOR, WIRE_MINOR);
  finish(fd);
  CHECK(get(fd) == F_HELLO);
  return fd;
}

static int found(uint16_t tag, struct item *i) {
  struct cursor c = {reply, reply + reply_head.length - 8};
  while (field_next(&c, i) > 0)
    if (i->tag == tag) return 1;
  return 0;
}
static const char *text_of(uint16_t tag) {
  struct item i;
  const char *s;
  return found(tag, &i) && !field_text(&i, &s) ? s : "";
}
static uint64_t number_of(uint16_t tag) {
  struct item i;
  uint64_t v = 0;
  if (found(tag, &i)) field_u64(&i, &v);
  return v;
}
static struct record record_of(void) {
  struct item i;
  struct record r;
  CHECK(found(T_RECORD, &i) && i.size >= sizeof r);
  memcpy(&r, i.p, sizeof r);
  return r;
}
static int stdout_is(const char *s) {
  struct item i;
  return found(T_STDOUT, &i) && i.size == strlen(s) && !memcmp(i.p, s, i.size);
}

static void exec_begin(const char *id, const char *shell, uint64_t flags) {
  begin(F_EXEC);
  frame_text(&out, T_COMMAND, id);
  frame_text(&out, T_SHELL, shell);
  frame_u64(&out, T_EXEC_FLAGS, flags);
}
// Runs text, collects, and returns the record; the reply stays in place.
static struct record run(int fd, const char *id, const char *shell, uint64_t timeout_ms) {
  exec_begin(id, shell, X_COLLECT);
  if (timeout_ms) frame_u64(&out, T_TIMEOUT_NS, timeout_ms * 1000000);
  finish(fd);
  int t = get(fd);
  if (t != F_END) { fprintf(stderr, "%s: reply %d %s %s\n", id, t, text_of(T_CODE), text_of(T_MESSAGE)); exit(1); }
  return record_of();
}
static struct record run_in(int fd, const char *session, const char *id, const char *shell, uint64_t timeout_ms) {
  exec_begin(id, shell, X_COLLECT);
  frame_text(&out, T_SESSION, session);
  if (timeout_ms) frame_u64(&out, T_TIMEOUT_NS, timeout_ms * 1000000);
  finish(fd);
  int t = get(fd);
  if (t != F_END) { fprintf(stderr, "%s: reply %d %s %s\n", id, t, text_of(T_CODE), text_of(T_MESSAGE)); exit(1); }
  return record_of();
}
static int about(int fd, uint8_t type, const char *id) {
  begin(type);
  frame_text(&out, T_COMMAND, id);
  finish(fd);
  return get(fd);
}
static int code_is(const char *code) { return reply_head.type == F_ERROR && !strcmp(text_of(T_CODE), code); }
