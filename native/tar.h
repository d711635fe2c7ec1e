// The tar formats: a pull reader over any source of bytes (tar_read.c), and the pieces that the writer (tar_pack.c) shares with it.
#ifndef DSEC_TAR_H
#define DSEC_TAR_H
#include <stddef.h>
#include <stdint.h>
#include "files.h"

#define TAR_BLOCK 512
#define TAR_EXTENDED_MAX (4u << 20)    // bytes of one entry's extended header (long names, attributes)
#define TAR_SEGMENTS_MAX 262144        // pieces of one sparse file

struct ustar {
  char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[6], version[2], owner[32], group[32],
       major[8], minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct ustar) == TAR_BLOCK, "ustar");

struct segment { uint64_t offset, size; };

struct tar_entry {
  const char *name, *link;             // as in the archive, any bytes but NUL
  char type;                           // '0' file, '1' hard link, '2' symlink, '3' char, '4' block, '5' directory, '6' fifo
  uint32_t mode, uid, gid, major, minor, nsec;
  int64_t mtime;
  uint64_t size;                       // of the file; a sparse one's with its holes
};

struct tar {
  // source: 1 and the bytes at hand, 0 at the end, -1 when it failed
  int (*peek)(void *arg, const uint8_t **p, size_t *n);
  void (*eat)(void *arg, size_t n);
  void *arg;

  struct tar_entry entry;
  char error[400];                     // "" when peek() failed
  uint64_t left, pad;                  // data bytes of the entry still on the stream, and its padding
  struct segment *map;                 // a sparse file's pieces
  size_t nmap, cap, at;                // at: the piece being read
  uint64_t into;                       // how far into it
  int sparse;
  struct blob name, link, global, local;                         // local: this entry's pax records, global's before it
  size_t attributes;                   // where tar_xattr() stands
};

int tar_next(struct tar *t);                                                     // 1: an entry, 0: end of archive, -1
int tar_data(struct tar *t, const uint8_t **p, size_t *n, uint64_t *offset);     // 1: bytes and where they belong, 0: no more, -1
void tar_eat(struct tar *t, size_t n);                                           // ... that many of them were used
// The entry's next user.* attribute: 1, or 0. The name is NUL-terminated by this call.
int tar_xattr(struct tar *t, char name[256], const uint8_t **value, size_t *size);
void tar_free(struct tar *t);

void tar_octal(char *field, size_t n, uint64_t v);                               // 0 when it does not fit: a pax record then has it
void tar_sum(struct ustar *h);
#endif
