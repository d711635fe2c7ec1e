// Frames and fields: what is built is read back, and nothing malformed is believed.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "frame.h"

static uint8_t space[WIRE_MAX + 256], payload[WIRE_MAX];

static void there_and_back(void) {
  int s[2];
  struct buf b = {.data = space, .cap = sizeof space};
  struct frame h;
  struct item i;
  uint64_t v;
  const char *t;
  assert(!socketpair(AF_UNIX, SOCK_STREAM, 0, s));
  frame_begin(&b, F_EXEC, 3, 77);
  frame_u64(&b, T_PID, 1ull << 40);
  frame_text(&b, T_NAME, "hello");
  frame_bytes(&b, T_BYTES, "", 0);
  assert(!frame_send(s[0], &b) && !frame_recv(s[1], &h, payload, sizeof payload));
  assert(h.type == F_EXEC && h.flags == 3 && h.request == 77);
  struct cursor c = {payload, payload + h.length - 8};
  assert(field_next(&c, &i) == 1 && i.tag == T_PID && !field_u64(&i, &v) && v == 1ull << 40);
  assert(field_next(&c, &i) == 1 && !field_text(&i, &t) && !strcmp(t, "hello") && field_u64(&i, &v));
  assert(field_next(&c, &i) == 1 && !i.size && field_text(&i, &t) && field_next(&c, &i) == 0);
  h = (struct frame){.length = WIRE_MAX + 9, .type = F_OK};              // longer than allowed
  assert(write(s[0], &h, sizeof h) == sizeof h && frame_recv(s[1], &h, payload, sizeof payload));
  close(s[0]);
  assert(frame_recv(s[1], &h, payload, sizeof payload));
  close(s[1]);
}

static void overflow(void) {
  uint8_t small[32];
  struct buf b = {.data = small, .cap = sizeof small};
  frame_begin(&b, F_OK, 0, 1);
  frame_text(&b, T_NAME, "this does not fit into what is left");
  assert(b.overflow && !frame_end(&b));
  frame_begin(&b, F_OK, 0, 1);
  assert(!b.overflow && frame_end(&b) == sizeof(struct frame));
}

static void malformed(void) {
  struct item i;
  const char *t;
  for (unsigned seed = 0; seed < 20000; seed++) {
    srand(seed);
    size_t n = (size_t)(rand() % 64);
    uint8_t *p = malloc(n + 1);                                          // exact, so that a sanitizer sees any step too far
    for (size_t k = 0; k < n; k++) p[k] = (uint8_t)(rand() % 3 ? rand() % 10 : 0);
    struct cursor c = {p, p + n};
    while (field_next(&c, &i) > 0) {
      assert(i.p >= p && i.p + i.size <= p + n);
      if (!field_text(&i, &t)) assert(strlen(t) == i.size - 1);
    }
    free(p);
  }
}

int main(void) {
  there_and_back();
  overflow();
  malformed();
  puts("ok");
  return 0;
}
