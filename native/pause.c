// PAUSE and RESUME: nothing inside runs, and its memory goes back to the host, until somebody wants something of it. An idle sandbox may
// do so by itself. Timeouts of commands stand still meanwhile; the lease does not.
#include "aether.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "machine.h"
#include "util.h"

#define FREEZE_NS (10000 * MS)         // a process in an uninterruptible wait keeps its group from freezing
#define LOOK_NS (2 * MS)
#define RETRY_NS (60000 * MS)          // after an idle one could not be frozen

static struct asker *askers;           // they wait for the freeze
static uint64_t give_up, retry;
static const char *why;

static void answer(const char *code, const char *text) {
  for (struct asker a; asker_next(&askers, &a);) {
    if (a.conn && code) conn_error(a.conn, a.request, code, 0, "%s", text);
    else if (a.conn) conn_ok(a.conn, a.request);
  }
}

static int freeze(const char *reason) {
  struct fault f = {0};
  if (A.paused) return 0;
  if (A.s->channel > 0 && machine_freeze(&f)) return -1; // what a guest has not written nobody else has: a snapshot may be wanted of a paused one
  if (write_at(A.s->cgroup_fd, "cgroup.freeze", "1")) {
    if (A.s->channel > 0) machine_thaw();
    return -1;
  }
  A.paused = A.now;
  give_up = A.now + FREEZE_NS;
  why = reason;
  return 0;
}

void pause_start(struct conn *c, const struct request *r) {
  if (A.paused && !give_up) { conn_ok(c, r->id); return; }
  if (r->present & HAS_IDLE && idle_for() < r->idle_ns) {
    conn_error(c, r->id, "unavailable", 0, "sandbox %s is in use", A.s->spec.id);
    return;
  }
  if (snapshot_under_way()) {
    conn_error(c, r->id, "unavailable", 0, "a snapshot of sandbox %s is being taken", A.s->spec.id);
    return;
  }
  if (asker_add(&askers, c, r->id)) { conn_error(c, r->id, "resource_exhausted", ENOMEM, "no memory to pause"); return; }
  if (freeze(r->present & HAS_IDLE ? REASON_PRESSURE : REASON_ASKED)) { answer("internal", "the sandbox's group cannot be frozen"); return; }
  timer_want(A.now);
}

uint64_t pause_idle(const char *reason) {
  if (A.now < retry) return retry;
  retry = A.now + RETRY_NS;
  if (snapshot_under_way() || freeze(reason)) return retry;
  timer_want(A.now);
  return NEVER;
}

void pause_end(void) {
  if (!A.paused) return;
  snapshot_thaw();
  reclaim_stop();
  commands_shift(A.now - A.paused);
  A.paused = give_up = 0;
  if (A.s->channel > 0) machine_thaw();
  answer("unavailable", "it was resumed before it stood still");
  if (strcmp(why, REASON_PRESSURE)) reclaim_bring();
  event("resumed", NULL, NULL);
  timer_want(A.now);
}

uint64_t pause_tick(void) {
  uint64_t done = 0;
  if (!give_up) return NEVER;
  if (!read_key(A.s->cgroup_fd, "cgroup.events", "frozen", &done) && done) {
    give_up = retry = 0;
    answer(NULL, NULL);
    event("paused", NULL, why);
    reclaim_start(why);
    return NEVER;
  }
  if (A.now < give_up) return A.now + LOOK_NS;
  answer("unavailable", "the processes of the sandbox could not be frozen");
  pause_end();
  return NEVER;
}

const char *pause_reason(void) { return why; }

void pause_forget(const struct conn *c) {
  asker_forget(askers, c);
}
