// A load: busy PERCENT of each 20 ms for MS milliseconds. KIND cpu: arithmetic on a table of 64 KiB; kernel: long reads in the kernel;
// output: writes to stdout. Prints (on stderr) how many units of work it did a second.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PERIOD 20000000ll
static uint32_t table[16384];
static char block[1 << 20];

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  int64_t busy = PERIOD / 100 * atoi(argv[2]), from = now(), to = from + atoll(argv[3]) * 1000000, units = 0;
  int zero = open("/dev/zero", O_RDONLY), kind = *argv[1];
  uint32_t x = 1;
  memset(block, 'x', sizeof block);
  for (int64_t start = from, t; (t = now()) < to;) {
    if (t - start >= busy && busy < PERIOD) {
      start += PERIOD;
      if (start > t) {
        struct timespec until = {start / 1000000000, start % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
      } else start = t;
      continue;
    }
    if (kind == 'k') units += read(zero, block, sizeof block) > 0;
    else if (kind == 'o') units += write(1, block, 65536) > 0;
    else {
      for (int i = 0; i < 16384; i++) { x = x * 1664525u + table[x >> 18]; table[i] = x; }
      units++;
    }
  }
  fprintf(stderr, "%lld\n", (long long)((double)units * 1e9 / (double)(now() - from)));
  return 0;
}
