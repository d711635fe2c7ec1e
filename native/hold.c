// Requests that wait while the memory of the sandbox is copied: nothing may start inside, nor write into what stands still there.
#include "aether.h"
#include <stdlib.h>
#include <string.h>

#define MOST_HELD (4u << 20)           // bytes

struct held { struct held *next; struct conn *conn; size_t size; uint32_t request; uint8_t type, payload[]; };
static struct held *first, **end = &first;
static size_t bytes;
static int holding;

static int starts_something(uint8_t type) {
  switch (type) {
    case F_EXEC: case F_SESSION_OPEN: case F_SIGNAL: case F_RESIZE: case F_STDIN: case F_STDIN_CLOSE: case F_FILE: case F_CONNECT:
      return 1;
    default: return 0;                 // to end things, or to look at them, is possible at any time
  }
}

int hold(struct conn *c, uint8_t type, uint32_t request, const uint8_t *payload, size_t size) {
  if (!holding || !starts_something(type)) return 0;
  if (type == F_FILE || type == F_CONNECT || type == F_STDIN || type == F_STDIN_CLOSE) {
    c->held = 1;                       // in the order in which they came: what comes behind is not read
    return 1;
  }
  struct held *h = bytes + size > MOST_HELD ? NULL : malloc(sizeof *h + size);
  if (!h) {
    conn_error(c, request, "unavailable", 0, "the memory of sandbox %s is being copied, and too many requests wait for that", A.s->spec.id);
    return 1;
  }
  *h = (struct held){.conn = c, .size = size, .request = request, .type = type};
  memcpy(h->payload, payload, size);
  bytes += size;
  *end = h;
  end = &h->next;
  return 1;
}

void hold_begin(void) {
  holding = 1;
  helpers_stop(1);
}

void hold_end(void) {
  if (!holding) return;
  holding = 0;
  helpers_stop(0);
  while (first) {
    struct held *h = first;
    if (!(first = h->next)) end = &first;
    bytes -= h->size;
    if (h->conn) request_handle(h->conn, h->type, h->request, h->payload, h->size);
    free(h);
  }
  conns_release();
}

void hold_forget(const struct conn *c) {
  for (struct held *h = first; h; h = h->next)
    if (h->conn == c) h->conn = NULL;
}
