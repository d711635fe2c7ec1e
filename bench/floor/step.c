// A latency-sensitive loop: a step is due every PERIOD us (a little jitter keeps it off the timer tick), wakes, and does a fixed amount of
// work. Prints the time from due to done of each step, in ns, one a line. `step` alone prints how many rounds of work take 1 ms.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile uint64_t sink;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void work(long rounds) {
  uint64_t x = 1;
  for (long i = 0; i < rounds; i++) x = x * 6364136223846793005ull + 1442695040888963407ull;
  sink = x;
}

int main(int argc, char **argv) {
  if (argc < 4) {
    int64_t best = INT64_MAX;
    for (int i = 0; i < 50; i++) {
      int64_t from = now();
      work(1000000);
      int64_t took = now() - from;
      if (took < best) best = took;
    }
    printf("%lld\n", 1000000ll * 1000000 / best);
    return 0;
  }
  long rounds = atol(argv[1]), n = atol(argv[2]), period = atol(argv[3]) * 1000;
  int64_t *took = calloc((size_t)n, sizeof *took), due = now() + period;
  uint32_t random = 1;
  if (!took) return 1;
  for (long i = 0; i < n; i++) {
    random = random * 1664525u + 1013904223u;
    int64_t at = due + random % 1000000;
    struct timespec t = {at / 1000000000, at % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)) {}
    work(rounds);
    took[i] = now() - at;
    due += period;
    if (due < at + took[i]) due = at + took[i];          // late steps do not pile up
  }
  for (long i = 0; i < n; i++) printf("%lld\n", (long long)took[i]);
  return 0;
}
