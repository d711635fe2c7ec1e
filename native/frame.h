// Reading and writing frames (wire.h) without allocation. The peer may be hostile: every length is checked before it is used.
#ifndef DSEC_FRAME_H
#define DSEC_FRAME_H
#include <stddef.h>
#include <stdint.h>
#include "wire.h"

struct buf { uint8_t *data; size_t used, cap; int overflow; };        // builds one frame; overflow instead of a write past the end

void frame_begin(struct buf *b, uint8_t type, uint8_t flags, uint32_t request);
void frame_u64(struct buf *b, uint16_t tag, uint64_t v);
void frame_bytes(struct buf *b, uint16_t tag, const void *p, size_t n);
void frame_text(struct buf *b, uint16_t tag, const char *s);
void frame_raw(struct buf *b, const void *p, size_t n);               // DATA: offset, then bytes
size_t frame_end(struct buf *b);                                      // patches the length; 0 on overflow

struct cursor { const uint8_t *p, *end; };                            // walks the fields of a payload
struct item { uint16_t tag; uint32_t size; const uint8_t *p; };
int field_next(struct cursor *c, struct item *i);                     // 1: one, 0: end, -1: malformed
int field_u64(const struct item *i, uint64_t *v);                     // 0, or -1 when it is not 8 bytes
// Text fields are NUL-terminated in place by the sender: the size counts the NUL and there is no other. -1: it is not so.
int field_text(const struct item *i, const char **s);

// Blocking, whole frames, for helpers that own their connection. Return 0, or -1 (EOF, error, malformed).
int frame_send(int fd, struct buf *b);
int frame_recv(int fd, struct frame *h, uint8_t *payload, size_t cap);
#endif
