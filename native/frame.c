// Frames and fields: see frame.h.
#include "frame.h"
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#define AFTER_LENGTH (sizeof(struct frame) - sizeof(uint32_t))   // what `length` counts besides the payload

static uint8_t *grow(struct buf *b, size_t n) {
  if (b->overflow || n > b->cap - b->used) { b->overflow = 1; return NULL; }
  uint8_t *p = b->data + b->used;
  b->used += n;
  return p;
}

void frame_begin(struct buf *b, uint8_t type, uint8_t flags, uint32_t request) {
  b->used = 0;
  b->overflow = 0;
  struct frame h = {.type = type, .flags = flags, .request = request};
  frame_raw(b, &h, sizeof h);
}

void frame_bytes(struct buf *b, uint16_t tag, const void *p, size_t n) {
  if (n > WIRE_MAX) { b->overflow = 1; return; }
  struct field f = {.tag = tag, .size = (uint32_t)n};
  uint8_t *to = grow(b, sizeof f + n);
  if (!to) return;
  memcpy(to, &f, sizeof f);
  if (n) memcpy(to + sizeof f, p, n);
}

void frame_u64(struct buf *b, uint16_t tag, uint64_t v) { frame_bytes(b, tag, &v, sizeof v); }

void frame_text(struct buf *b, uint16_t tag, const char *s) { frame_bytes(b, tag, s, strlen(s) + 1); }

void frame_raw(struct buf *b, const void *p, size_t n) {
  uint8_t *to = grow(b, n);
  if (to && n) memcpy(to, p, n);
}

size_t frame_end(struct buf *b) {
  if (b->overflow || b->used < sizeof(struct frame) || b->used - sizeof(struct frame) > WIRE_MAX) { b->overflow = 1; return 0; }
  uint32_t length = (uint32_t)(b->used - sizeof length);
  memcpy(b->data, &length, sizeof length);
  return b->used;
}

int field_next(struct cursor *c, struct item *i) {
  size_t left = (size_t)(c->end - c->p);
  if (!left) return 0;
  struct field f;
  if (left < sizeof f) return -1;
  memcpy(&f, c->p, sizeof f);
  if (f.zero || f.size > left - sizeof f) return -1;
  *i = (struct item){.tag = f.tag, .size = f.size, .p = c->p + sizeof f};
  c->p += sizeof f + f.size;
  return 1;
}

int field_u64(const struct item *i, uint64_t *v) {
  if (i->size != sizeof *v) return -1;
  memcpy(v, i->p, sizeof *v);
  return 0;
}

int field_text(const struct item *i, const char **s) {
  if (!i->size || memchr(i->p, 0, i->size) != i->p + i->size - 1) return -1;
  *s = (const char *)i->p;
  return 0;
}

static int ready(int fd, short events) {
  struct pollfd p = {.fd = fd, .events = events};
  while (poll(&p, 1, -1) < 0)
    if (errno != EINTR) return -1;
  return 0;
}

int frame_send(int fd, struct buf *b) {
  size_t n = frame_end(b);
  if (!n) { errno = EMSGSIZE; return -1; }
  for (size_t done = 0; done < n;) {
    ssize_t r = send(fd, b->data + done, n - done, MSG_NOSIGNAL);
    if (r >= 0) done += (size_t)r;
    else if (errno == EAGAIN) { if (ready(fd, POLLOUT)) return -1; }
    else if (errno != EINTR) return -1;
  }
  return 0;
}

static int take(int fd, void *to, size_t n) {
  for (size_t done = 0; done < n;) {
    ssize_t r = recv(fd, (char *)to + done, n - done, 0);
    if (r > 0) done += (size_t)r;
    else if (r == 0) { errno = ECONNRESET; return -1; }
    else if (errno == EAGAIN) { if (ready(fd, POLLIN)) return -1; }
    else if (errno != EINTR) return -1;
  }
  return 0;
}

int frame_recv(int fd, struct frame *h, uint8_t *payload, size_t cap) {
  if (take(fd, h, sizeof *h)) return -1;
  if (h->zero || h->length < AFTER_LENGTH || h->length - AFTER_LENGTH > WIRE_MAX || h->length - AFTER_LENGTH > cap) {
    errno = EPROTO;
    return -1;
  }
  return take(fd, payload, h->length - AFTER_LENGTH);
}
