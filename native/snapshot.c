// SNAPSHOT: the writable layer as it is at one instant, as a volume of its own. A child does it, so that the loop goes on while the medium
// writes back what is dirty: everything inside is frozen, the volume is copied by reference, everything goes on.
#include "aether.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "machine.h"
#include "node.h"
#include "util.h"

#define LOOK_NS (2 * MS)
#define FREEZE_MS 10000                // a process in an uninterruptible wait keeps its group from freezing

struct snapshot {
  struct source src;
  struct snapshot *next;
  pid_t pid;
  struct conn *conn;
  uint32_t request;
  char name[96];
  int waits, leaves;                   // waits: for programs that are being started; leaves: no copy of the files, the sandbox is to be hibernated
  char *memory;                        // directory for it
  uint64_t most;                       // bytes that it may take there
};
static struct snapshot *snapshots;     // in turn: only the first one has a child
static const char unconfined[] = "internal";             // by its address: somebody inside has more rights than a command

// What supervisor and child tell each other: a resume in the middle must not move what is copied, and what nobody wants to stand still must go on
// the moment the copy is made, for the supervisor may be waiting for a program that has to start. Each says its own and then looks at the other's.
static struct { atomic_int paused, done; } *shared;

static void begin(struct snapshot *n);

static int freeze(int on) { return write_at(A.s->cgroup_fd, "cgroup.freeze", on ? "1" : "0"); }

int snapshot_freeze(struct fault *f) {
  uint64_t done = 0;
  if (freeze(1)) return fault_host(f, errno, "freeze sandbox %s", A.s->spec.id);
  for (int i = 0; i < FREEZE_MS; i++) {
    if (!read_key(A.s->cgroup_fd, "cgroup.events", "frozen", &done) && done) return 0;
    nap_us(1000);
  }
  return fault_set(f, "unavailable", 0, "the processes of sandbox %s could not be frozen within %d s", A.s->spec.id, FREEZE_MS / 1000);
}

// Whatever came of it, who was copied is looked at before it runs on.
static int memory_take(const struct snapshot *n, struct fault *f) {
  struct fault none = {0};
  int bad = checkpoint_take(n->memory, n->most, f);
  if (snapshot_freeze(&none) || inside_confined()) return bad;
  *f = none;
  return fault_set(f, unconfined, 0, "a process of sandbox %s had more rights than a command when its memory was copied", A.s->spec.id);
}

static void __attribute__((noreturn)) take(const struct snapshot *n, int report, pid_t parent) {
  struct fault f = {0};
  // what it would leave when its supervisor is killed now is nobody's
  if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || getppid() != parent) _exit(1);
  // the first one writes back what is dirty, so that the freeze is short
  int still = n->leaves || A.paused || (!medium_snapshot(A.s, n->name, &f) && !medium_remove(n->name));
  if (still && !snapshot_freeze(&f) && (!n->memory || !memory_take(n, &f))) {
    if (n->leaves) checkpoint_sync(n->memory, &f);
    else medium_snapshot(A.s, n->name, &f);
  }
  atomic_store(&shared->done, 1);
  int stays = f.code == unconfined || (n->leaves && !f.code);            // it does not run on
  if (!stays && !atomic_load(&shared->paused)) freeze(0);
  (void)!write(report, &f, sizeof f);
  _exit(0);
}

static void drop(struct snapshot *n) {
  struct snapshot **p = &snapshots;
  while (*p != n) p = &(*p)->next;
  *p = n->next;
  A.helpers--;
  touch();
  idle_again();
  if (n->memory) hold_end();
  free(n->memory);
  loop_free(n);
  if (snapshots) begin(snapshots);
}

static void on_report(struct source *src, uint32_t events) {
  (void)events;
  struct snapshot *n = OWNER(src, struct snapshot, src);
  struct fault f;
  if (read(src->fd, &f, sizeof f) != sizeof f) f = (struct fault){.code = "internal", .message = "the process that took the snapshot died"};
  if (f.code == unconfined) sandbox_end("infra_lost", f.message, NULL, 0);
  loop_close(src);
  while (waitpid(n->pid, NULL, 0) < 0 && errno == EINTR) {}
  n->pid = 0;
  if (n->leaves && n->conn && !f.code && !keep_all(n->memory, &f)) sandbox_leave(R_HIBERNATED, n->conn, n->request);
  if (!A.paused) freeze(0);            // it may have been killed before it did
  if (!A.paused && A.s->channel > 0) machine_thaw();
  if (!n->leaves && (f.code || !n->conn)) medium_remove(n->name);        // nobody knows of it
  if (n->memory && !n->conn) remove_all(AT_FDCWD, n->memory);
  if (n->conn && f.code) conn_error(n->conn, n->request, f.code, f.err, "%s", f.message);
  else if (n->conn) conn_ok(n->conn, n->request);
  drop(n);
}

static int something_starts(void) {
  for (const struct command *cmd = A.live; cmd; cmd = cmd->next)
    if (exec_starting(cmd)) return 1;
  return 0;
}

static void begin(struct snapshot *n) {
  int report[2] = {-1, -1};
  if (n->memory) hold_begin();         // before it is frozen: what is stopped by then stays so when criu thaws it
  if ((n->waits = n->memory && !A.paused && something_starts())) { timer_want(A.now + LOOK_NS); return; }
  pid_t self = getpid();
  struct fault f = {0};
  if (A.s->channel > 0 && machine_freeze(&f)) {
    if (n->conn) conn_error(n->conn, n->request, f.code, f.err, "%s", f.message);
    drop(n);
    return;
  }
  if (!shared && (shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED) shared = NULL;
  if (shared) {
    atomic_store(&shared->paused, A.paused != 0);
    atomic_store(&shared->done, 0);
  }
  if (!shared || pipe2(report, O_CLOEXEC) || (n->pid = fork()) < 0) {
    close_fd(&report[0]);
    close_fd(&report[1]);
    n->pid = 0;
    if (!A.paused && A.s->channel > 0) machine_thaw();
    if (n->conn) conn_error(n->conn, n->request, "resource_exhausted", errno, "start a process for a snapshot of sandbox %s", A.s->spec.id);
    drop(n);
    return;
  }
  if (!n->pid) take(n, report[1], self);
  close(report[1]);
  n->src = (struct source){.on = on_report, .fd = report[0]};
  loop_want(&n->src, EPOLLIN);
}

// A name that is for a moment says whose it is.
static int named(const char *name) {
  size_t n = strlen(A.s->spec.id);
  return name && snapshot_named(name) && (!strncmp(name, "snap-", 5) || (!strncmp(name, A.s->spec.id, n) && name[n] == '.'));
}

static void enqueue(struct conn *c, const struct request *r, const char *name, int leaves);

void snapshot_start(struct conn *c, struct request *r) {
  if (!named(r->name)) { conn_error(c, r->id, "invalid_request", 0, "SNAPSHOT: a name snap-SUFFIX or %s.SUFFIX is needed", A.s->spec.id); return; }
  if (A.s->spec.medium != MEDIUM_BTRFS) { conn_error(c, r->id, "unsupported", 0, "a sandbox whose disk is memory has no snapshots"); return; }
  enqueue(c, r, r->name, 0);
}

void snapshot_leave(struct conn *c, struct request *r) {
  if (*r->path != '/' || !r->length) { conn_error(c, r->id, "invalid_request", 0, "LEAVE: a directory, and how much may go there, are needed"); return; }
  if (!A.running) { sandbox_leave(R_HIBERNATED, c, r->id); return; }
  if (snapshots) { conn_error(c, r->id, "unavailable", 0, "a snapshot of sandbox %s is being taken", A.s->spec.id); return; }
  enqueue(c, r, "", 1);
}

static void enqueue(struct conn *c, const struct request *r, const char *name, int leaves) {
  if (r->path && A.s->channel > 0) { conn_error(c, r->id, "unsupported", 0, "the memory of a microVM is not copied by its supervisor"); return; }
  if (r->path && node.criu < 0) { conn_error(c, r->id, "unsupported", 0, "this node has no criu: the memory of a sandbox cannot be copied"); return; }
  struct snapshot *n = calloc(1, sizeof *n), **end = &snapshots;
  if (!n || (r->path && !(n->memory = strdup(r->path)))) {
    free(n);
    conn_error(c, r->id, "resource_exhausted", ENOMEM, "no memory for a snapshot");
    return;
  }
  n->src.fd = -1;
  n->conn = c;
  n->request = r->id;
  n->most = r->length;
  n->leaves = leaves;
  snprintf(n->name, sizeof n->name, "%s", name);
  while (*end) end = &(*end)->next;
  *end = n;
  A.helpers++;
  if (snapshots == n) begin(n);
}

int snapshot_under_way(void) { return snapshots != NULL; }

void snapshot_thaw(void) {
  if (snapshots) {
    atomic_store(&shared->paused, 0);
    if (!atomic_load(&shared->done)) return;
  }
  freeze(0);
}

uint64_t snapshots_tick(void) {
  if (snapshots && snapshots->waits) begin(snapshots);
  return snapshots && snapshots->waits ? A.now + LOOK_NS : NEVER;
}

void snapshots_forget(const struct conn *c) {
  for (struct snapshot *n = snapshots; n; n = n->next)
    if (n->conn == c) n->conn = NULL;
}

void snapshots_end(void) {
  for (struct snapshot *n = snapshots; n; n = n->next) {
    if (!n->pid) continue;
    kill(n->pid, SIGKILL);
    while (waitpid(n->pid, NULL, 0) < 0 && errno == EINTR) {}
    if (!n->leaves) medium_remove(n->name);
  }
}
