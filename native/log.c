// The bounded log of one output stream: memory up to 4 KiB, then a file with a head region and a ring behind it.
#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int logs_dir = -1;
static uint64_t used, budget;

void log_setup(int dir, uint64_t bytes) { logs_dir = dir; budget = bytes; used = 0; }
uint64_t log_used(void) { return used; }

void log_init(struct log *l, const char *command, int which, uint64_t head, uint64_t tail) {
  if (head > UINT32_MAX) head = UINT32_MAX;
  if (tail > UINT32_MAX) tail = UINT32_MAX;
  l->total = 0;
  l->head = (uint32_t)head;
  l->tail = (uint32_t)tail;
  l->room = head + tail;
  l->fd = -1;
  l->file = l->evicted = 0;
  snprintf(l->name, sizeof l->name, "%.31s.%s", command, which ? "err" : "out");
}

uint64_t log_kept(const struct log *l) {
  if (l->evicted) return 0;
  return !l->file || l->total < l->room ? l->total : l->room;
}

// Space for n more bytes in files: the oldest ended logs make room. 0: there is none, everything left belongs to running commands.
static int claim(uint64_t n) {
  while (used + n > budget)
    if (!records_evict_oldest()) return 0;
  used += n;
  return 1;
}

uint64_t log_budget(void) { return budget; }
void log_charge(uint64_t n) { if (!claim(n)) used += n; }  // a record is written in any case

static int write_at(int fd, const uint8_t *p, size_t n, uint64_t at) {
  while (n) {
    ssize_t r = pwrite(fd, p, n, (off_t)at);
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) return -1;
    p += r; n -= (size_t)r; at += (uint64_t)r;
  }
  return 0;
}

// What cannot be kept from here on is dropped and counted: the log is the first `size` bytes from now on.
static void freeze(struct log *l, uint64_t size) { l->room = size; }

// Appends to the file, which holds the first min(at, room) bytes of the stream or, once it is full, a head and a ring.
static void put(struct log *l, const uint8_t *p, size_t n, uint64_t at) {
  uint64_t full = (uint64_t)l->head + l->tail;
  if (l->room < full) return;                           // frozen
  if (at < full) {                                      // it still grows
    size_t part = full - at < n ? (size_t)(full - at) : n;
    if (!claim(part)) { freeze(l, at); return; }
    if (l->evicted) { used -= part; return; }           // an ended command's log that made the room itself
    if (write_at(l->fd, p, part, at)) { used -= part; freeze(l, at); return; }
    p += part; n -= part; at += part;
  }
  if (!n || !l->tail) return;
  if (n > l->tail) { at += n - l->tail; p += n - l->tail; n = l->tail; }
  while (n) {
    uint64_t slot = (at - l->head) % l->tail;
    size_t part = l->tail - slot < n ? (size_t)(l->tail - slot) : n;
    if (write_at(l->fd, p, part, l->head + slot)) {     // a ring with a hole is no log: what stays is the head
      freeze(l, l->head);
      return;
    }
    p += part; n -= part; at += part;
  }
}

static void make_file(struct log *l) {
  l->file = 1;
  l->fd = openat(logs_dir, l->name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (l->fd < 0) { freeze(l, 0); return; }
  put(l, l->small, (size_t)l->total, 0);
}

void log_spill(struct log *l) { if (!l->file && l->total) make_file(l); }

void log_write(struct log *l, const void *p, size_t n) {
  uint64_t at = l->total;
  if (!l->file && at + n <= LOG_SMALL) {
    memcpy(l->small + at, p, n);
    l->total += n;
    return;
  }
  if (!l->file) make_file(l);
  if (!l->evicted && l->fd >= 0) put(l, p, n, at);
  l->total += n;
}

struct piece log_piece(const struct log *l, uint64_t offset, size_t max) {
  struct piece none = {.from = l->total, .size = 0};
  if (l->evicted || offset >= l->total) return none;
  uint64_t end = l->total, full = (uint64_t)l->head + l->tail;
  if (l->file) {
    if (l->room < full) end = l->room < end ? l->room : end;
    else if (offset < l->head) end = l->head < end ? l->head : end;
    else {
      uint64_t begin = l->total > full ? l->total - l->tail : l->head;
      if (offset < begin) offset = begin;
      if (!l->tail) return none;
      uint64_t slot = (offset - l->head) % l->tail;
      if (end - offset > l->tail - slot) end = offset + l->tail - slot;
    }
    if (offset >= end) return none;
  }
  return (struct piece){.from = offset, .size = end - offset < max ? (size_t)(end - offset) : max};
}

size_t log_read(struct log *l, struct piece at, void *to) {
  if (!l->file) {
    memcpy(to, l->small + at.from, at.size);
    return at.size;
  }
  if (l->fd < 0) l->fd = openat(logs_dir, l->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (l->fd < 0) return 0;
  uint64_t full = (uint64_t)l->head + l->tail;
  uint64_t slot = l->room < full || at.from < l->head ? at.from : l->head + (at.from - l->head) % l->tail;
  size_t done = 0;
  while (done < at.size) {
    ssize_t r = pread(l->fd, (uint8_t *)to + done, at.size - done, (off_t)(slot + done));
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) break;
    done += (size_t)r;
  }
  return done;
}

void log_close(struct log *l) {
  if (l->fd >= 0) close(l->fd);
  l->fd = -1;
}

void log_evict(struct log *l) {
  log_close(l);
  if (l->file) l->evicted = 1;
}

int log_resume(struct log *l, uint64_t total, uint64_t room) {
  struct stat st;
  l->total = total;
  if (!total) return 0;
  l->file = 1;
  l->room = room;
  l->fd = openat(logs_dir, l->name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (l->fd < 0 || fstat(l->fd, &st)) { freeze(l, 0); return -1; }
  used += (uint64_t)st.st_size;
  return 0;
}

void log_adopt(const char *command, int which) {
  char name[40];
  struct stat st;
  snprintf(name, sizeof name, "%.31s.%s", command, which ? "err" : "out");
  if (!fstatat(logs_dir, name, &st, AT_SYMLINK_NOFOLLOW)) used += (uint64_t)st.st_size;
}

// Removes a file of an ended command and gives its bytes back to the budget.
void log_remove(const char *command, int which) {
  char name[40];
  struct stat st;
  snprintf(name, sizeof name, "%.31s.%s", command, which ? "err" : "out");
  if (fstatat(logs_dir, name, &st, AT_SYMLINK_NOFOLLOW) || unlinkat(logs_dir, name, 0)) return;
  used -= (uint64_t)st.st_size < used ? (uint64_t)st.st_size : used;
}
