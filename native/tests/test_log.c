// The bounded log and the records: every byte of every geometry against a plain copy of the stream, budget, eviction, forgetting.
#include "../log.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

static char evicted[64];
void command_evicted(const char *command) { snprintf(evicted, sizeof evicted, "%s", command); }

static uint8_t byte_at(uint64_t o) { return (uint8_t)(o * 31 + o / 251); }

static void feed(struct log *l, size_t n) {
  static uint8_t chunk[300000];
  for (size_t i = 0; i < n; i++) chunk[i] = byte_at(l->total + i);
  log_write(l, chunk, n);
}

// What can be read is the head and the tail, in order, with the right bytes; returns how much.
static uint64_t verify(struct log *l) {
  static uint8_t to[1 << 20];
  uint64_t at = 0, kept = 0;
  for (struct piece p; (p = log_piece(l, at, 1 + (size_t)(at * 7 % 5000))).size; at = p.from + p.size) {
    CHECK(p.from >= at && log_read(l, p, to) == p.size);
    for (size_t i = 0; i < p.size; i++) CHECK(to[i] == byte_at(p.from + i));
    kept += p.size;
  }
  CHECK(kept == log_kept(l));
  return kept;
}

static void geometry(void) {
  static const uint32_t sizes[][2] = {{0, 0}, {0, 5000}, {5000, 0}, {1, 1}, {100, 100}, {4096, 4096}, {65536, 65536}, {10000, 3}, {3, 10007}};
  for (size_t g = 0; g < sizeof sizes / sizeof *sizes; g++)
    for (unsigned seed = 0; seed < 12; seed++) {
      struct log l;
      log_init(&l, "geometry", 0, sizes[g][0], sizes[g][1]);
      srand(seed);
      for (int i = 0; i < 25; i++) {
        static const int steps[] = {1, 10, 4096, 4097, 70000, 299999};
        feed(&l, (size_t)(1 + rand() % steps[rand() % 6]));
        uint64_t full = (uint64_t)sizes[g][0] + sizes[g][1], want = !l.file || l.total < full ? l.total : full;
        CHECK(verify(&l) == want);
      }
      log_close(&l);
      log_remove("geometry", 0);
    }
  CHECK(log_used() == 0);
}

static void finish(const char *id, size_t out, size_t err) {
  struct record r = {.code = 0, .ending = END_EXITED, .head = 8192, .tail = 8192};
  struct log l[2];
  snprintf(r.command, sizeof r.command, "%s", id);
  for (int i = 0; i < 2; i++) { log_init(&l[i], id, i, 8192, 8192); feed(&l[i], i ? err : out); }
  CHECK(!records_append(&r, &l[0], &l[1]));
  log_close(&l[0]);
  log_close(&l[1]);
}

static void records(int dir) {
  struct record r;
  struct log out, err;
  finish("small", 100, 0);
  finish("large", 100000, 50);
  CHECK(records_load("none", &r, &out, &err) == -1);
  CHECK(!records_load("small", &r, &out, &err) && r.out_inline == 100 && verify(&out) == 100 && verify(&err) == 0);
  CHECK(!records_load("large", &r, &out, &err) && r.out_dropped == 100000 - 16384 && verify(&out) == 16384 && verify(&err) == 50);
  log_close(&out);
  char id[32];
  for (int i = 0; i < 200; i++) {                       // 16 KiB each in a budget of 1 MiB
    snprintf(id, sizeof id, "fill-%d", i);
    finish(id, 20000, 0);
    CHECK(log_used() <= 1 << 20);
  }
  CHECK(!records_load("large", &r, &out, &err) && r.flags & R_LOG_EVICTED && r.out_dropped == r.out_total && verify(&out) == 0 && verify(&err) == 50);
  CHECK(!records_load("fill-199", &r, &out, &err) && verify(&out) == 16384);
  log_close(&out);
  CHECK(*evicted);
  // one running log that alone is over the budget keeps what fits, and everything is counted
  log_init(&out, "huge", 0, 4 << 20, 4 << 20);
  for (int i = 0; i < 40; i++) feed(&out, 100000);
  CHECK(out.total == 4000000 && log_used() <= 1 << 20 && verify(&out) > 500000);
  log_close(&out);
  log_remove("huge", 0);
  for (int i = 0; i < 400; i++) { snprintf(id, sizeof id, "heavy-%d", i); finish(id, 4000, 0); } // more than half the budget in records
  CHECK(!records_load("heavy-399", &r, &out, &err) && !r.out_inline && verify(&out) == 4000);
  log_close(&out);
  CHECK(!records_load("heavy-1", &r, &out, &err) && r.out_inline == 4000 && verify(&out) == 4000);
  CHECK(log_used() <= 1 << 20);
  log_setup(dir, 64 << 20);
  uint64_t first = records_first();
  for (int i = 0; i < RECORDS_MAX + 10; i++) { snprintf(id, sizeof id, "many-%d", i); finish(id, 1, 0); }
  CHECK(first == 0 && records_end() - records_first() == RECORDS_MAX);
  CHECK(records_load("small", &r, &out, &err) == -1 && records_load("many-0", &r, &out, &err) == -1);
  snprintf(id, sizeof id, "many-%d", RECORDS_MAX + 9);
  CHECK(!records_load(id, &r, &out, &err) && verify(&out) == 1);
  CHECK(!records_at(records_end() - 1, &r) && !strcmp(r.command, id));
}

int main(void) {
  char dir[] = "/tmp/aether-log-XXXXXX", command[64];
  CHECK(mkdtemp(dir));
  int fd = open(dir, O_RDONLY | O_DIRECTORY);
  log_setup(fd, 1 << 20);
  CHECK(!records_setup(fd));
  geometry();
  records(fd);
  close(fd);
  snprintf(command, sizeof command, "rm -rf %s", dir);
  return system(command);
}
