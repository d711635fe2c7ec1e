// Pages that a program asked to find empty after a fork (MADV_WIPEONFORK): generators of random numbers keep there what two processes must
// never share. To a fork with memory they are so, too: they are emptied in the images, before anybody can read them.
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "util.h"

#define MOST_RANGES 1024
#define ENTRIES_AT 8                   // behind two magic numbers
#define PRESENT 4u                     // flag of an entry: its pages are in the file

struct range { uint64_t from, to; };

// How many there are, the first MOST_RANGES of them; -1: nobody can say.
static int ranges_of(int32_t pid, struct range *r) {
  char path[48], line[4300];
  struct range at = {0};
  int n = 0;
  snprintf(path, sizeof path, "/proc/%d/smaps", pid);
  FILE *m = fopen(path, "re");
  if (!m) return errno == ENOENT || errno == ESRCH ? 0 : -1;     // a dead one has none
  while (fgets(line, sizeof line, m)) {
    unsigned long long from, to;
    if (sscanf(line, "%llx-%llx ", &from, &to) == 2) at = (struct range){from, to};
    else if (!strncmp(line, "VmFlags:", 8) && strstr(line, " wf") && n++ < MOST_RANGES) r[n - 1] = at;
  }
  int bad = ferror(m);
  fclose(m);
  return bad ? -1 : n;
}

static uint64_t number(const uint8_t *p) {
  uint64_t v = 0;
  for (int shift = 0; p && shift < 64; shift += 7) {
    v |= (uint64_t)(*p & 0x7f) << shift;
    if (!(*p++ & 0x80)) break;
  }
  return v;
}

// One entry: where its pages are in memory and, from `at` on, in the file.
static int wipe_entry(int pages, const struct range *r, int n, uint64_t vaddr, uint64_t size, uint64_t at) {
  for (int i = 0; i < n; i++) {
    uint64_t from = r[i].from > vaddr ? r[i].from : vaddr, to = r[i].to < vaddr + size ? r[i].to : vaddr + size;
    if (from < to && fallocate(pages, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(at + from - vaddr), (off_t)(to - from))) return -1;
  }
  return 0;
}

int images_wipe(int dir, int32_t pid, int32_t inner, struct fault *f) {
  static const unsigned one[] = {1, 0}, two[] = {2, 0}, four[] = {4, 0};
  static struct range r[MOST_RANGES];
  char name[48];
  struct stat st;
  int n = ranges_of(pid, r), pages = -1, bad = 0;
  uint64_t at = 0, page = (uint64_t)sysconf(_SC_PAGESIZE);
  if (!n) return 0;
  if (n < 0) return fault_host(f, errno, "read the memory map of process %d", inner);
  if (n > MOST_RANGES) {
    snprintf(name, sizeof name, "process %d", inner);
    return refuse_copy(f, name, "it has too many areas that a fork empties");
  }
  snprintf(name, sizeof name, "pagemap-%d.img", inner);
  int map = openat(dir, name, O_RDONLY | O_CLOEXEC);
  uint8_t *whole = map < 0 || fstat(map, &st) || st.st_size <= ENTRIES_AT ? MAP_FAILED : mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, map, 0);
  close_fd(&map);
  if (whole == MAP_FAILED) return fault_set(f, "internal", errno, "look for pages that a fork empties in %s", name);
  uint8_t *p = whole + ENTRIES_AT, *end = whole + st.st_size;
  for (int head = 1; !bad && end - p >= 4; head = 0) {
    uint32_t size;
    memcpy(&size, p, sizeof size);
    p += sizeof size;
    if ((bad = size > (size_t)(end - p))) break;
    if (head) {
      snprintf(name, sizeof name, "pages-%llu.img", (unsigned long long)number(number_in(p, p + size, one)));
      bad = (pages = openat(dir, name, O_RDWR | O_CLOEXEC)) < 0;
    } else if (number(number_in(p, p + size, four)) & PRESENT) {
      uint64_t bytes = number(number_in(p, p + size, two)) * page;
      bad = wipe_entry(pages, r, n, number(number_in(p, p + size, one)), bytes, at);
      at += bytes;
    }
    p += size;
  }
  // every page in the file was accounted for, or the entries mean something else than we think
  if (!bad) bad = fstat(pages, &st) || (uint64_t)st.st_size != at;
  munmap(whole, (size_t)(end - whole));
  close_fd(&pages);
  return bad ? fault_set(f, "internal", errno, "empty the pages that a fork empties in %s", name) : 0;
}
