// See presence.h. dsec.images.remote.presence writes the maps.
#include "presence.h"
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define FILES 8192                     // a power of two; files above three quarters of it are asked about as if they had no map
#define FULL (FILES / 4 * 3)
#define MOST (1u << 26)                // chunks of one

// offsets[chunks + 1], then uint32_t first[chunks], then uint8_t have[chunks]: 0, 1, or 2 at the edge of what was fetched ahead
struct map {
  uint64_t dev, ino, reads;            // reads: let through
  uint32_t chunks, order;              // chunks: 0 when the filler has let go of it; order: the last number given out
  uint64_t offsets[];
};

struct file { struct map *map; size_t size; uint64_t dev, ino; };
static struct file files[FILES];
static unsigned used;

static unsigned find(uint64_t dev, uint64_t ino) {
  unsigned i = (unsigned)((ino * 0x9e3779b97f4a7c15u ^ dev) >> 40) % FILES;
  while (files[i].map && (files[i].ino != ino || files[i].dev != dev)) i = (i + 1) % FILES;
  return i;
}

static size_t size_of(uint64_t chunks) { return sizeof(struct map) + (chunks + 1) * sizeof(uint64_t) + chunks * (sizeof(uint32_t) + 1); }

// Lets go of the maps that the filler has let go of.
static void sweep(void) {
  static struct file old[FILES];
  memcpy(old, files, sizeof files);
  memset(files, 0, sizeof files);
  used = 0;
  for (unsigned i = 0; i < FILES; i++) {
    if (!old[i].map) continue;
    if (!old[i].map->chunks) { munmap(old[i].map, old[i].size); continue; }
    files[find(old[i].dev, old[i].ino)] = old[i];
    used++;
  }
}

void presence_take(int fd) {
  struct stat st;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) || st.st_size < (off_t)size_of(0)) return;
  size_t size = (size_t)st.st_size;
  struct map *m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (m == MAP_FAILED) return;
  if (used >= FULL) sweep();
  unsigned i = find(m->dev, m->ino);
  if (!m->chunks || m->chunks > MOST || size != size_of(m->chunks) || (!files[i].map && used >= FULL)) { munmap(m, size); return; }
  if (files[i].map) munmap(files[i].map, files[i].size);
  else used++;
  files[i] = (struct file){m, size, m->dev, m->ino};
}

void presence_drop(void) {
  for (unsigned i = 0; i < FILES && used; i++)
    if (files[i].map) { munmap(files[i].map, files[i].size); used--; }
  memset(files, 0, sizeof files);
}

int presence_of(uint64_t dev, uint64_t ino, uint64_t off, uint64_t count) {
  unsigned i = find(dev, ino);
  struct map *m = files[i].map;
  if (!m) return ABSENT;
  // the size of the map says how many chunks there are, whatever is written into it later
  uint32_t n = (uint32_t)((files[i].size - size_of(0)) / (sizeof(uint64_t) + sizeof(uint32_t) + 1)), low = 0, high = n;
  uint32_t *first = (uint32_t *)(m->offsets + n + 1);
  uint8_t *have = (uint8_t *)(first + n);
  uint64_t size = m->offsets[n], end = off + (count ? count : 1);
  if (off >= size || end < off) return ABSENT;
  if (end > size) end = size;
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (m->offsets[middle] <= off) low = middle;
    else high = middle;
  }
  int found = PRESENT;
  for (uint32_t c = low; c < n && m->offsets[c] < end; c++) {
    uint8_t h = __atomic_load_n(&have[c], __ATOMIC_ACQUIRE);
    if (!first[c]) first[c] = ++m->order;
    if (!h) found = ABSENT;
    else if (h == 2 && found == PRESENT) found = EDGE;
  }
  if (found != ABSENT) m->reads++;
  return found;
}
