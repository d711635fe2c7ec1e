// Drives fuzz_wire.c without libFuzzer: random frames of plausible shape, then of mutated bytes. `test_fuzz SECONDS SEED` for longer runs.
#include "fuzz_wire.c"
#include <signal.h>
#include <time.h>

static uint64_t state;
static uint32_t rnd(uint32_t n) {      // xorshift: the same seed gives the same run
  state ^= state << 13; state ^= state >> 7; state ^= state << 17;
  return (uint32_t)((state >> 11) % n);
}

static size_t plausible_field(uint8_t *p) {
  static const uint16_t tags[] = {T_COMMAND, T_ARG, T_SHELL, T_SESSION, T_ENV, T_CWD, T_USER, T_EXEC_FLAGS, T_ROWS, T_COLS, T_TIMEOUT_NS,
    T_BYTES, T_SIGNAL, T_SCOPE, T_STREAM, T_OFFSET, T_OFFSET_ERR, T_LENGTH, T_FOLLOW, T_NAME, T_DEADLINE_NS, T_IDLE_NS, T_LOG_HEAD, T_VERSION_MAJOR, T_HOSTNAME,
    T_OP, T_PATH, T_PORT, 0, 999};
  static const char *texts[] = {"a", "b", "small", "zz", "", "A=b", "=", "../a", "this-id-is-longer-than-thirty-one-bytes"};
  static const uint64_t numbers[] = {0, 1, 2, 3, 9, 64, 255, 65536, 1ull << 40, UINT64_MAX, 1ull << 63};
  struct field f = {.tag = tags[rnd(sizeof tags / sizeof *tags)]};
  uint64_t v = numbers[rnd(11)];
  const char *s = texts[rnd(9)];
  const void *from = rnd(2) ? (const void *)s : &v;
  f.size = from == s ? (uint32_t)strlen(s) + 1 : 8;
  if (!rnd(40)) f.size = rnd(1000);
  if (!rnd(60)) f.zero = 1;
  memcpy(p, &f, sizeof f);
  size_t whole = from == s ? strlen(s) + 1 : 8, n = f.size < whole ? f.size : whole;
  memcpy(p + sizeof f, from, n);
  if (f.size > n && f.size < 1000) memset(p + sizeof f + n, 'x', f.size - n);
  return sizeof f + f.size;
}

int main(int argc, char **argv) {
  double limit = argc > 1 ? atof(argv[1]) : 3;
  state = argc > 2 ? strtoull(argv[2], NULL, 0) : 88172645463325252ull;
  static uint8_t input[200000];
  unsigned long runs = 0;
  signal(SIGPIPE, SIG_IGN);
  for (time_t began = time(NULL); difftime(time(NULL), began) < limit; runs++) {
    size_t n = 0;
    input[n++] = (uint8_t)rnd(256);
    for (uint32_t frames = 1 + rnd(12); frames; frames--) {
      size_t start = n;
      n += sizeof(struct frame);
      for (uint32_t k = rnd(6); k; k--) n += plausible_field(input + n);
      struct frame h = {.length = (uint32_t)(n - start - 4), .type = (uint8_t)(rnd(8) ? F_SUBSCRIBE + rnd(F_RESTORE - F_SUBSCRIBE + 1) : rnd(256)), .request = rnd(5)};
      if (h.type == F_STOP || h.type == F_LEAVE) h.type = F_STAT;
      if (!rnd(30)) h.type = F_CONNECT;
      if (!rnd(50)) h.length = rnd(3) ? rnd(100) : UINT32_MAX - rnd(20);
      memcpy(input + start, &h, sizeof h);
    }
    if (!rnd(3))
      for (uint32_t k = rnd(8); k; k--) input[rnd((uint32_t)n)] ^= (uint8_t)(1u << rnd(8));
    LLVMFuzzerTestOneInput(input, n);
  }
  char command[64];
  snprintf(command, sizeof command, "rm -rf %s", fuzz_dir);
  printf("  %lu sequences of frames\n", runs);
  return system(command);
}
