// A command's output as aether keeps it: a bounded log per stream, and the records of ended commands (architecture.md, section 4).
#ifndef DSEC_LOG_H
#define DSEC_LOG_H
#include <stddef.h>
#include <stdint.h>
#include "wire.h"

#define LOG_SMALL 4096                 // output of at most this size never makes a file
#define RECORDS_MAX 100000             // ended commands that can be found; beyond it the oldest are forgotten

struct log {
  uint64_t total;                      // bytes that the command wrote
  uint32_t head, tail;                 // geometry
  uint64_t room;                       // of these, the ones that may be there: head + tail, less when the disk or the budget ended it
  int fd;                              // -1: no file
  uint8_t file, evicted;               // it has a file; it had one
  char name[40];                       // of the file
  uint8_t small[LOG_SMALL];
};

// One readable piece at or after `offset`: [from, from + size); size 0: nothing is there any more, from is the end.
struct piece { uint64_t from; size_t size; };

void log_setup(int dir, uint64_t budget);      // directory of the files, and what all of them together may hold
void log_init(struct log *l, const char *command, int which, uint64_t head, uint64_t tail);
void log_write(struct log *l, const void *p, size_t n);
struct piece log_piece(const struct log *l, uint64_t offset, size_t max);
size_t log_read(struct log *l, struct piece at, void *to); // bytes read; less than asked when the file is gone
uint64_t log_kept(const struct log *l);
uint64_t log_used(void);
void log_close(struct log *l);                 // the file stays
void log_evict(struct log *l);                 // the bytes are gone, the totals stay
void log_spill(struct log *l);                 // into a file even when it is small
// for records.c
uint64_t log_budget(void);
void log_charge(uint64_t n);                   // a record counts like a log, and makes the oldest logs go
int log_resume(struct log *l, uint64_t total, uint64_t room);   // after log_init: of a command that ran before this supervisor; -1: its file is gone
void log_adopt(const char *command, int which);                 // a file that an earlier supervisor wrote
void log_remove(const char *command, int which);                // the file of an ended command, and its share of the budget

// records.c: commands.bin and its index
int records_setup(int dir);                    // those that an earlier supervisor of the sandbox wrote are known again
// Appends the record with the logs' inline bytes. 0, or -1 when the disk refused (errno).
int records_append(struct record *r, struct log *out, struct log *err);
void records_update(const struct record *r);   // totals and flags of one that is there
// The record of a command into r, its logs ready to be read. 0, or -1: unknown.
int records_load(const char *command, struct record *r, struct log *out, struct log *err);
uint64_t records_first(void);                  // sequence numbers, for listing: [first, end)
uint64_t records_end(void);
int records_at(uint64_t seq, struct record *r);
int records_evict_oldest(void);                // 1: something was freed
// command.c: an ended command may still be in memory with its file open
void command_evicted(const char *command);
#endif
