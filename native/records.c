// commands.bin: one record for each ended command, appended in one write, and the index that finds them by id.
#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct entry {                         // one ended command
  char id[32];
  uint64_t at;                         // its place in commands.bin
  uint32_t size, next;                 // next: in its bucket, 0: none; sequence number + 1
  uint8_t files, evicted;              // files: 1 stdout, 2 stderr
};

static int file = -1;
static uint64_t file_size, first, end, evict_next;
static struct entry *entries;          // by sequence number & (cap - 1)
static uint32_t *buckets, cap;

static struct entry *entry_of(uint64_t seq) { return &entries[seq & (cap - 1)]; }

static uint32_t hash_of(const char *id) {
  uint32_t h = 2166136261u;
  for (int i = 0; i < 32 && id[i]; i++) h = (h ^ (uint8_t)id[i]) * 16777619u;
  return h ^ h >> 15;
}

static void link_in(uint64_t seq) {
  struct entry *e = entry_of(seq);
  uint32_t *b = &buckets[hash_of(e->id) & (cap - 1)];
  e->next = *b;
  *b = (uint32_t)(seq & 0x7fffffff) + 1;
}

static struct entry *find(const char *id) {
  if (!cap) return NULL;
  for (uint32_t n = buckets[hash_of(id) & (cap - 1)]; n; n = entry_of(n - 1)->next)
    if (!strncmp(entry_of(n - 1)->id, id, 32)) return entry_of(n - 1);
  return NULL;
}

static int grow(void) {
  uint32_t wider = cap ? cap * 2 : 64;
  struct entry *e = calloc(wider, sizeof *e);
  uint32_t *b = calloc(wider, sizeof *b);
  if (!e || !b) { free(e); free(b); errno = ENOMEM; return -1; }
  for (uint64_t seq = first; seq < end; seq++) e[seq & (wider - 1)] = *entry_of(seq);
  free(entries);
  free(buckets);
  entries = e; buckets = b; cap = wider;
  for (uint64_t seq = first; seq < end; seq++) link_in(seq);
  return 0;
}

static int read_record(const struct entry *e, struct record *r) {
  ssize_t n;
  do n = pread(file, r, sizeof *r, (off_t)e->at); while (n < 0 && errno == EINTR);
  return n == (ssize_t)sizeof *r && r->magic == RECORD_MAGIC ? 0 : -1;
}

static int write_record(const struct entry *e, const struct record *r) {
  ssize_t n;
  do n = pwrite(file, r, sizeof *r, (off_t)e->at); while (n < 0 && errno == EINTR);
  return n == (ssize_t)sizeof *r ? 0 : -1;
}

// The bytes of its files go; record and inline output stay.
static int evict(struct entry *e) {
  struct record r;
  if (e->evicted || !e->files || read_record(e, &r)) return 0;
  e->evicted = 1;
  if (e->files & 1) { log_remove(e->id, 0); r.out_dropped = r.out_total; }
  if (e->files & 2) { log_remove(e->id, 1); r.err_dropped = r.err_total; }
  r.flags |= R_LOG_EVICTED;
  (void)write_record(e, &r);           // a disk that refuses costs only this mark: the files are gone, and readers see that
  command_evicted(e->id);
  return 1;
}

int records_evict_oldest(void) {
  if (evict_next < first) evict_next = first;
  while (evict_next < end)
    if (evict(entry_of(evict_next++))) return 1;
  return 0;
}

static void forget_oldest(void) {
  struct entry *e = entry_of(first);
  (void)evict(e);
  uint32_t me = (uint32_t)(first & 0x7fffffff) + 1;
  for (uint32_t *b = &buckets[hash_of(e->id) & (cap - 1)]; *b; b = &entry_of(*b - 1)->next)
    if (*b == me) { *b = e->next; break; }
  first++;
}

static int enter(const struct record *r, uint64_t at, int files, int gone) {
  if (end - first >= RECORDS_MAX) forget_oldest();
  if (end - first == cap && grow()) return -1;
  uint64_t seq = end++;
  struct entry *e = entry_of(seq);
  *e = (struct entry){.at = at, .size = r->size, .files = (uint8_t)files, .evicted = (uint8_t)gone};
  memcpy(e->id, r->command, sizeof e->id);
  link_in(seq);
  return 0;
}

// A record whose write was cut off, and what follows it, does not count.
int records_setup(int dir) {
  struct record r;
  struct stat st;
  file = openat(dir, "commands.bin", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0 || fstat(file, &st)) return -1;
  for (struct entry at = {0}; !read_record(&at, &r); at.at = file_size) {
    if (r.out_inline > LOG_SMALL || r.err_inline > LOG_SMALL || r.size != sizeof r + r.out_inline + r.err_inline) break;
    if (file_size + r.size > (uint64_t)st.st_size) break;
    int files = (r.out_total > r.out_inline ? 1 : 0) | (r.err_total > r.err_inline ? 2 : 0);
    if (enter(&r, file_size, files, r.flags & R_LOG_EVICTED)) return -1;
    log_adopt(r.command, 0);
    log_adopt(r.command, 1);
    log_charge(r.size);
    file_size += r.size;
  }
  return file_size < (uint64_t)st.st_size ? ftruncate(file, (off_t)file_size) : 0;
}

static uint64_t dropped(const struct log *l) { return l->total - log_kept(l); }

int records_append(struct record *r, struct log *out, struct log *err) {
  if (end - first >= RECORDS_MAX) forget_oldest();
  if (end - first == cap && grow()) return -1;           // before the write, or a record would be there that nobody finds
  // records stay for good: they may fill half of the budget with output, then they carry none and leave the rest to the logs
  int heavy = file_size > log_budget() / 2;
  if (heavy) { log_spill(out); log_spill(err); }
  r->magic = RECORD_MAGIC;
  r->out_total = out->total; r->out_dropped = dropped(out);
  r->err_total = err->total; r->err_dropped = dropped(err);
  r->out_inline = out->file ? 0 : (uint32_t)out->total;
  r->err_inline = err->file ? 0 : (uint32_t)err->total;
  r->size = (uint32_t)sizeof *r + r->out_inline + r->err_inline;
  struct iovec v[3] = {{r, sizeof *r}, {out->small, r->out_inline}, {err->small, r->err_inline}};
  ssize_t n;
  do n = pwritev(file, v, 3, (off_t)file_size); while (n < 0 && errno == EINTR);
  if (n != (ssize_t)r->size) { if (n >= 0) errno = ENOSPC; return -1; }
  (void)enter(r, file_size, (out->file ? 1 : 0) | (err->file ? 2 : 0), 0);
  file_size += r->size;
  if (!heavy) log_charge(r->size);
  return 0;
}

void records_update(const struct record *r) {
  struct entry *e = find(r->command);
  struct record old;
  if (!e || read_record(e, &old)) return;
  struct record now = *r;
  now.size = old.size; now.out_inline = old.out_inline; now.err_inline = old.err_inline;
  now.flags |= old.flags;
  if (now.out_total > now.out_inline) e->files |= 1;    // what came later made a file
  if (now.err_total > now.err_inline) e->files |= 2;
  (void)write_record(e, &now);         // the record as it was at the end of the command stays valid
}

static void load_log(struct log *l, const struct entry *e, const struct record *r, int which) {
  uint64_t total = which ? r->err_total : r->out_total, gone = which ? r->err_dropped : r->out_dropped;
  log_init(l, r->command, which, r->head, r->tail);
  l->total = total;
  l->file = total > (which ? r->err_inline : r->out_inline);
  l->evicted = l->file && e->evicted;
  if (l->file && gone && total - gone < l->room) l->room = total - gone;
}

int records_load(const char *command, struct record *r, struct log *out, struct log *err) {
  struct entry *e = find(command);
  if (!e || read_record(e, r)) return -1;
  if (r->out_inline > LOG_SMALL || r->err_inline > LOG_SMALL) return -1;
  load_log(out, e, r, 0);
  load_log(err, e, r, 1);
  struct iovec v[2] = {{out->small, r->out_inline}, {err->small, r->err_inline}};
  ssize_t want = (ssize_t)(r->out_inline + r->err_inline), n = 0;
  if (want) do n = preadv(file, v, 2, (off_t)(e->at + sizeof *r)); while (n < 0 && errno == EINTR);
  return n == want ? 0 : -1;
}

uint64_t records_first(void) { return first; }
uint64_t records_end(void) { return end; }
int records_at(uint64_t seq, struct record *r) { return seq < first || seq >= end ? -1 : read_record(entry_of(seq), r); }
