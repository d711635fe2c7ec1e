// The tar reader without clang: archives of every form that it knows, broken in structured ways, through fuzz_tar.c. `test_tar SECONDS SEED`
// for longer or other runs.
#include "fuzz_tar.c"
#include <time.h>

static uint64_t state = 1;
static uint32_t next(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 33);
}

static uint8_t seed[64 << 10], input[96 << 10];
static size_t used;

static struct ustar *member(const char *name, char type, const char *link, uint64_t size, int gnu) {
  struct ustar *h = (struct ustar *)(seed + used);
  memset(h, 0, sizeof *h);
  snprintf(h->name, sizeof h->name, "%s", name);
  snprintf(h->link, sizeof h->link, "%s", link);
  tar_octal(h->mode, 8, 0755);
  tar_octal(h->uid, 8, 1000);
  tar_octal(h->gid, 8, 1000);
  tar_octal(h->size, 12, size);
  tar_octal(h->mtime, 12, 1600000000);
  h->type = type;
  memcpy(h->magic, gnu ? "ustar  " : "ustar\0" "00", 8);
  used += TAR_BLOCK;
  return h;
}

static void body(const void *p, size_t n) {
  memset(seed + used, 0, (n + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK);
  memcpy(seed + used, p, n);
  used += (n + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
}

static size_t pax(char *to, const char *key, const char *value) {
  size_t bodysize = strlen(key) + strlen(value) + 3, size = bodysize + 1;
  for (size_t digits = 1, ten = 10; size >= ten; digits++, ten *= 10) size = bodysize + digits + 1;
  return (size_t)sprintf(to, "%zu %s=%s\n", size, key, value);
}

static void extended(char type, const char *const *pairs) {
  char text[4096];
  size_t n = 0;
  for (; *pairs; pairs += 2) n += pax(text + n, pairs[0], pairs[1]);
  member("././@PaxHeader", type, "", n, 0);
  body(text, n);
}

static void sums(uint8_t *p, size_t n) {
  for (size_t at = 0; at + TAR_BLOCK <= n; at += TAR_BLOCK)
    if (!memcmp(p + at + 257, "ustar", 5)) tar_sum((struct ustar *)(p + at));
}

static void make_seed(void) {
  uint8_t data[3000];
  char name[300];
  memset(data, 'd', sizeof data);
  memset(name, 'n', sizeof name - 1);
  name[sizeof name - 1] = 0;
  name[200] = '/';
  used = 0;
  extended('g', (const char *const[]){"comment", "all of them", "mtime", "-1.25", NULL});
  member("./", '5', "", 0, 0);
  member("d/", '5', "", 0, 0);
  member("d/file", '0', "", sizeof data, 0);
  body(data, sizeof data);
  member("link", '2', "d/file", 0, 0);
  member("out", '2', "../outside", 0, 0);
  member("hard", '1', "d/file", 0, 0);
  member("fifo", '6', "", 0, 0);
  extended('x', (const char *const[]){"path", name, "mtime", "1600000000.123456789", "size", "700", "uid", "70000", "SCHILY.xattr.user.k", "value", "linkpath", "x", NULL});
  member("short", '0', "", 0, 0);
  body(data, 700);
  member("././@LongLink", 'L', "", sizeof name, 1);
  body(name, sizeof name);
  member("././@LongLink", 'K', "", sizeof name, 1);
  body(name, sizeof name);
  member("gnu", '2', "", 0, 1);
  extended('x', (const char *const[]){"GNU.sparse.major", "1", "GNU.sparse.minor", "0", "GNU.sparse.name", "sp/arse", "GNU.sparse.realsize", "100000", NULL});
  member("sp/GNUSparseFile.0/arse", '0', "", TAR_BLOCK + 600, 0);
  body("2\n0\n500\n50000\n100\n", 18);
  body(data, 600);
  extended('x', (const char *const[]){"GNU.sparse.map", "0,10,512,20", "GNU.sparse.size", "1000", "GNU.sparse.numblocks", "2", "GNU.sparse.name", "s01", NULL});
  member("s01", '0', "", 30, 0);
  body(data, 30);
  extended('x', (const char *const[]){"GNU.sparse.size", "1000", "GNU.sparse.offset", "5", "GNU.sparse.numbytes", "7", "GNU.sparse.offset", "500", "GNU.sparse.numbytes", "9", NULL});
  member("s00", '0', "", 16, 0);
  body(data, 16);
  struct ustar *h = member("old", 'S', "", 120, 1);
  char *map = (char *)h + 386;
  for (int i = 0; i < 4; i++) {
    tar_octal(map + i * 24, 12, (uint64_t)i * 1000);
    tar_octal(map + i * 24 + 12, 12, 20);
  }
  ((char *)h)[482] = 1;
  tar_octal((char *)h + 483, 12, 60000);
  uint8_t more[TAR_BLOCK] = {0};
  for (int i = 0; i < 2; i++) {
    tar_octal((char *)more + i * 24, 12, 10000 + (uint64_t)i * 1000);
    tar_octal((char *)more + i * 24 + 12, 12, 20);
  }
  body(more, sizeof more);
  body(data, 120);
  member("volume", 'V', "", 0, 1);
  memset(seed + used, 0, 2 * TAR_BLOCK);
  used += 2 * TAR_BLOCK;
  sums(seed, used);
}

static size_t mutate(void) {
  static const char *const words[] = {"/", "..", "../outside/x", "pre/x", "out/x", "link", "d", ".", "", "18446744073709551615", "4611686018427387904", "99999999",
                                      "-", "=", "\n", "path=", "777777777777", "\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"};
  size_t n = used;
  memcpy(input, seed, n);
  for (uint32_t i = next() % 6; i; i--) {
    size_t blocks = n / TAR_BLOCK, a = next() % blocks, b = next() % blocks;
    struct ustar *h = (struct ustar *)(input + a * TAR_BLOCK);
    switch (next() % 9) {
      case 0: input[next() % n] = (uint8_t)next(); break;
      case 1: input[next() % n] ^= (uint8_t)(1 << next() % 8); break;
      case 2: memcpy(input + a * TAR_BLOCK, input + b * TAR_BLOCK, TAR_BLOCK); break;
      case 3: if (n + TAR_BLOCK <= sizeof input) { memmove(input + (a + 1) * TAR_BLOCK, input + a * TAR_BLOCK, n - a * TAR_BLOCK); n += TAR_BLOCK; } break;
      case 4: if (blocks > 2) { memmove(input + a * TAR_BLOCK, input + (a + 1) * TAR_BLOCK, n - (a + 1) * TAR_BLOCK); n -= TAR_BLOCK; } break;
      case 5: { const char *w = words[next() % (sizeof words / sizeof *words)]; size_t at = next() % (n - 16), m = strlen(w); memcpy(input + at, w, m ? m : 1); break; }
      case 6: h->type = "01234567LKxgSVXDM\0a"[next() % 19]; break;
      case 7: { const char *w = words[next() % (sizeof words / sizeof *words)]; memcpy(next() % 2 ? h->name : next() % 2 ? h->link : h->size, w, strlen(w) < 12 ? strlen(w) + 1 : 12); break; }
      default: if (next() % 8 == 0) n = 1 + next() % n; else tar_octal(h->size, 12, next() % 4096); break;
    }
    if (n < 2 * TAR_BLOCK) break;
  }
  if (next() % 16) sums(input, n);
  return n;
}

int main(int argc, char **argv) {
  double limit = argc > 1 ? atof(argv[1]) : 3;
  uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 0) : 1, runs = 0;
  struct timespec begin, now;
  make_seed();
  // the seed itself is a good archive
  fuzz_read(seed, used, 1);
  struct memory m = {seed, used, 0, 999};
  struct tar t = {.peek = memory_peek, .eat = memory_eat, .arg = &m};
  int entries = 0, r;
  while ((r = tar_next(&t)) > 0) entries++;
  if (r) fprintf(stderr, "test_tar: %s\n", t.error);
  check(!r && entries == 13, "the good archive was not read to its end");
  tar_free(&t);
  clock_gettime(CLOCK_MONOTONIC, &begin);
  do {
    state = (first + runs) * 0x9e3779b97f4a7c15ull;
    size_t n = mutate();
    fuzz_read(input, n, 1 + next() % 2000);
    fuzz_unpack(input, n);
    runs++;
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while ((double)(now.tv_sec - begin.tv_sec) < limit);
  fuzz_end();
  printf("test_tar: %llu archives from seed %llu\n", (unsigned long long)runs, (unsigned long long)first);
  return 0;
}
