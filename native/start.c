// Processes on their way into the sandbox, as their supervisor sees them. A program starts in two steps: a first process joins the
// sandbox's groups and namespaces where nobody inside can see it, gives everything up, and makes a second one that is born inside as our
// child and has nothing left to do but exec. The first one ends then.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "machine.h"
#include "start.h"
#include "util.h"

#define MAX_STARTS 1024                // at once; a page of second pids
#define WAIT_MS 15000                  // a start that is waited for and takes longer is stuck: out of memory, or frozen
#define STOPS_MAX 10                   // a process that somebody inside stops before its exec is continued so often

// The kernel writes the pid of each second process here, whoever dies meanwhile. Shared with the first processes, never with what runs inside.
static pid_t *seconds;
static uint64_t taken[MAX_STARTS / 64];
static int under_way;

struct leaving { pid_t pid; int slot, inside; };         // to be reaped; inside: its second process lives on as a command of ours
static struct leaving *leaving;
static size_t leaving_n, leaving_cap;

static int slot_take(void) {
  if (!seconds) {
    void *page = mmap(NULL, MAX_STARTS * sizeof *seconds, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return -1;
    seconds = page;
  }
  for (int i = 0; i < MAX_STARTS; i++)
    if (!(taken[i / 64] >> (i % 64) & 1)) {
      taken[i / 64] |= 1ull << (i % 64);
      seconds[i] = 0;
      under_way++;
      return i;
    }
  errno = EAGAIN;
  return -1;
}

static void slot_give(int slot) {
  if (slot < 0) return;
  taken[slot / 64] &= ~(1ull << (slot % 64));
  under_way--;
}

pid_t *start_second(const struct start *st) { return &seconds[st->slot]; }

void start_forget(void) {
  if (seconds) munmap(seconds, MAX_STARTS * sizeof *seconds);
}

int starts_under_way(void) { return under_way; }

// 1: reaped, and its second process too unless that is a command
static int gone(struct leaving *l) {
  pid_t got = waitpid(l->pid, NULL, WNOHANG);
  if (!got || (got < 0 && errno == EINTR)) return 0;
  pid_t second = l->slot >= 0 && !l->inside ? seconds[l->slot] : 0;
  slot_give(l->slot);
  if (second <= 0) return 1;
  kill(second, SIGKILL);
  *l = (struct leaving){second, -1, 0};
  return 0;
}

int starts_reap(void) {
  for (size_t i = 0; i < leaving_n;)
    if (gone(&leaving[i])) leaving[i] = leaving[--leaving_n];
    else i++;
  return (int)leaving_n;
}

static void leave(pid_t pid, int slot, int inside) {
  struct leaving l = {pid, slot, inside};
  if (leaving_n == leaving_cap) {
    size_t wider = leaving_cap ? leaving_cap * 2 : 16;
    struct leaving *p = realloc(leaving, wider * sizeof *p);
    if (!p) {                          // no memory for the list: wait for it now
      while (!gone(&l)) nap_us(100);
      return;
    }
    leaving = p;
    leaving_cap = wider;
  }
  leaving[leaving_n++] = l;
}

int start_open(struct start *st, int *child_end, struct fault *f) {
  int status[2];
  *st = (struct start){.pidfd = -1, .status = -1, .slot = slot_take()};
  if (st->slot < 0)
    return errno == EAGAIN ? fault_set(f, "resource_exhausted", 0, "%d programs are starting at once", MAX_STARTS) : fault_host(f, errno, "share a page");
  if (pipe2(status, O_CLOEXEC)) {
    fault_host(f, errno, "make a pipe");
    slot_give(st->slot);
    return -1;
  }
  st->status = status[0];
  *child_end = status[1];
  return 0;
}

void start_cancel(struct start *st) {
  close_fd(&st->status);
  slot_give(st->slot);
}

void start_abandon(struct start *st) {
  if (st->slot == MACHINE_SLOT) { machine_abandon(st); return; }
  sys_pidfd_kill(st->pidfd, SIGKILL);
  close_fd(&st->pidfd);
  leave(st->pid, st->slot, 0);
}

// The last step before exec is taken in sight of the sandbox's users, who can stop the process there.
int start_look(struct start *st, struct fault *f) {
  siginfo_t info = {0};
  if (st->slot == MACHINE_SLOT) return 0;                // the hand looks
  pid_t second = *start_second(st);
  if (second <= 0 || waitid(P_PID, (id_t)second, &info, WSTOPPED | WNOHANG) || !info.si_pid) return 0;
  if (++st->stops <= STOPS_MAX && !kill(second, SIGCONT)) return 0;
  return fault_set(f, "sandbox_damaged", 0, "a process of the sandbox stops each program before it starts");
}

int start_done(struct start *st, pid_t *pid, int *pidfd, struct fault *f) {
  struct fault said;
  ssize_t n;
  if (st->slot == MACHINE_SLOT) return machine_started(st, pid, pidfd, f);
  do n = read(st->status, &said, sizeof said); while (n < 0 && errno == EINTR);
  pid_t second = *start_second(st);
  if (n) {
    start_abandon(st);
    if (n == (ssize_t)sizeof said) *f = said;
    else fault_set(f, "internal", errno, "hear how a program started");
    return -1;
  }
  if (second <= 0) {                   // our own code, which has no second process; or it died on its way, and that is how this command ended
    slot_give(st->slot);
    *pid = st->pid;
    *pidfd = st->pidfd;
    return 0;
  }
  close_fd(&st->pidfd);
  leave(st->pid, st->slot, 1);
  *pid = second;
  *pidfd = sys_pidfd_open(second);     // our child: its pid is its own until we reap it
  if (*pidfd >= 0) return 0;
  fault_host(f, errno, "open the pidfd of a program");
  kill(second, SIGKILL);
  leave(second, -1, 0);
  return -1;
}

pid_t sandbox_enter_now(struct sandbox *s, const struct entry *x, int *pidfd, struct fault *f) {
  struct start st;
  pid_t pid = -1;
  *pidfd = -1;
  if (sandbox_enter(s, x, &st, f)) return -1;
  struct pollfd p = {.fd = st.status, .events = POLLIN};
  int ready, bad = 0, left = WAIT_MS;
  while ((ready = poll(&p, 1, START_LOOK_MS)) <= 0 && !bad && (left -= START_LOOK_MS) > 0) bad = ready ? 0 : start_look(&st, f);
  if (ready > 0) bad = start_done(&st, &pid, pidfd, f);
  else {
    if (!bad) fault_set(f, "internal", 0, "the program did not start within %d s", WAIT_MS / 1000);
    bad = -1;
    start_abandon(&st);
  }
  close(st.status);
  return bad ? -1 : pid;
}
