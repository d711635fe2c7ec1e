// PAUSE and RESUME: nothing inside runs, and what it keeps in the page cache goes back to the host, until somebody wants something of it.
// Timeouts of commands stand still meanwhile; the lease does not.
#include "aether.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define FREEZE_NS (10000 * MS)         // a process in an uninterruptible wait keeps its group from freezing
#define LOOK_NS (2 * MS)

struct asker { struct asker *next; struct conn *conn; uint32_t request; };
static struct asker *askers;           // they wait for the freeze
static uint64_t give_up;
static pid_t reclaimer;

static void answer(const char *code, const char *text) {
  while (askers) {
    struct asker *a = askers;
    askers = a->next;
    if (a->conn && code) conn_error(a->conn, a->request, code, 0, "%s", text);
    else if (a->conn) conn_ok(a->conn, a->request);
    free(a);
  }
}

// It may take long and may be stopped at any time, so a child does it.
static void reclaim(void) {
  reclaimer = fork();
  if (reclaimer) return;
  cgroup_reclaim(A.s);
  _exit(0);
}

static void reap_reclaimer(int now) {
  if (reclaimer <= 0) return;
  if (now) kill(reclaimer, SIGKILL);
  if (waitpid(reclaimer, NULL, now ? 0 : WNOHANG)) reclaimer = 0;
}

void pause_start(struct conn *c, uint32_t request) {
  if (A.paused && !give_up) { conn_ok(c, request); return; }
  struct asker *a = calloc(1, sizeof *a);
  if (!a) { conn_error(c, request, "resource_exhausted", ENOMEM, "no memory to pause"); return; }
  *a = (struct asker){askers, c, request};
  if (snapshot_under_way()) {
    free(a);
    conn_error(c, request, "unavailable", 0, "a snapshot of sandbox %s is being taken", A.s->spec.id);
    return;
  }
  askers = a;
  if (!A.paused) {
    if (write_at(A.s->cgroup_fd, "cgroup.freeze", "1")) {
      answer("internal", "the sandbox's group cannot be frozen");
      return;
    }
    A.paused = A.now;
    give_up = A.now + FREEZE_NS;
  }
  timer_want(A.now);
}

void pause_end(void) {
  if (!A.paused) return;
  write_at(A.s->cgroup_fd, "cgroup.freeze", "0");
  reap_reclaimer(1);
  commands_shift(A.now - A.paused);
  A.paused = give_up = 0;
  answer("unavailable", "it was resumed before it stood still");
  event("resumed", NULL, NULL);
  timer_want(A.now);
}

uint64_t pause_tick(void) {
  uint64_t done = 0;
  reap_reclaimer(0);
  if (!give_up) return reclaimer > 0 ? A.now + 50 * MS : NEVER;
  if (!read_key(A.s->cgroup_fd, "cgroup.events", "frozen", &done) && done) {
    give_up = 0;
    answer(NULL, NULL);
    reclaim();
    return A.now + 50 * MS;
  }
  if (A.now < give_up) return A.now + LOOK_NS;
  answer("unavailable", "the processes of the sandbox could not be frozen");
  pause_end();
  return NEVER;
}

void pause_forget(const struct conn *c) {
  for (struct asker *a = askers; a; a = a->next)
    if (a->conn == c) a->conn = NULL;
}

void pause_killed(void) { reap_reclaimer(1); }
