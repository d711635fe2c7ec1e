// Maps of what is there: what is not wholly there is asked about, whatever the map says of itself.
#include <assert.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>
#include "../presence.h"

#define CHUNKS 4
struct map { uint64_t dev, ino, reads; uint32_t chunks, order; uint64_t offsets[CHUNKS + 1]; uint32_t first[CHUNKS]; uint8_t have[CHUNKS]; } __attribute__((packed));

static struct map *give(uint64_t ino, uint32_t chunks, int seals, size_t size) {
  int fd = memfd_create("map", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  assert(fd >= 0 && !ftruncate(fd, (off_t)size));
  struct map *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert(m != MAP_FAILED);
  *m = (struct map){.dev = 1, .ino = ino, .chunks = chunks, .offsets = {0, 4096, 12288, 16384, 20000}};
  if (seals) assert(!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
  presence_take(fd);
  close(fd);
  return m;
}

int main(void) {
  assert(presence_of(1, 2, 0, 4096) == ABSENT);
  struct map *m = give(2, CHUNKS, 1, sizeof *m);
  assert(presence_of(1, 2, 0, 4096) == ABSENT && m->reads == 0);
  m->have[1] = m->have[2] = 1;
  assert(presence_of(1, 2, 4096, 12288) == PRESENT && m->reads == 1);
  assert(presence_of(1, 2, 4095, 2) == ABSENT);            // the chunk before it
  assert(presence_of(1, 2, 16383, 2) == ABSENT);           // the one behind it
  assert(presence_of(1, 2, 4096, 0) == PRESENT);           // a range without a length stands for its first byte
  m->have[2] = 2;
  assert(presence_of(1, 2, 4096, 8192) == PRESENT && presence_of(1, 2, 8192, 8192) == EDGE);
  m->have[3] = 1;
  assert(presence_of(1, 2, 16384, 1 << 20) == PRESENT);    // beyond the end there is nothing
  assert(presence_of(1, 2, 20000, 1) == ABSENT && presence_of(1, 2, UINT64_MAX - 1, 100) == ABSENT);
  assert(presence_of(1, 3, 4096, 1) == ABSENT && presence_of(2, 2, 4096, 1) == ABSENT);
  assert(m->first[0] == 1 && m->first[1] == 2 && m->first[2] == 3 && m->first[3] == 4 && m->order == 4);
  m->chunks = 1 << 20;                                     // what was checked when it came is what counts
  assert(presence_of(1, 2, 16384, 1) == PRESENT);

  struct map *again = give(2, CHUNKS, 1, sizeof *m);       // a newer map of the same file takes its place
  assert(presence_of(1, 2, 4096, 1) == ABSENT);
  again->have[0] = 1;
  assert(presence_of(1, 2, 0, 1) == PRESENT);

  give(5, CHUNKS, 0, sizeof *m)->have[0] = 1;              // it could shrink under the loader
  give(6, CHUNKS - 1, 1, sizeof *m)->have[0] = 1;          // its size is not its own
  give(7, 0, 1, sizeof *m)->have[0] = 1;
  for (uint64_t ino = 5; ino < 8; ino++) assert(presence_of(1, ino, 0, 1) == ABSENT);

  presence_drop();
  assert(presence_of(1, 2, 0, 1) == ABSENT);
  for (uint64_t ino = 100; ino < 8000; ino++) {            // so many that some have no place
    struct map *one = give(ino, CHUNKS, 1, sizeof *m);
    one->have[0] = 1;
    if (ino < 150) one->chunks = 0;                        // let go of, and then there is room
    munmap(one, sizeof *one);
  }
  unsigned known = 0;
  for (uint64_t ino = 100; ino < 8000; ino++) known += presence_of(1, ino, 0, 1) == PRESENT;
  assert(known == 6144 && presence_of(1, 120, 0, 1) == ABSENT && presence_of(1, 150 + 6143, 0, 1) == PRESENT);
  presence_drop();
  return 0;
}
