// User namespaces, one for each range of ids. A namespace is nothing but its maps, and the edge never gives one range to two sandboxes at
// a time, so the launcher keeps the last ones instead of making each anew (a process of its own, a quarter of a millisecond).
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define KEPT 512

static struct { uint32_t base; int fd; } kept[KEPT];
static unsigned used, next;
static char stack[16384] __attribute__((aligned(16)));

// What the kernel counts for root of the host, whoever inside takes it: one sandbox shall not have it all. [1]: the host's own limit.
static const char *const shared[][2] = {
  {"/proc/sys/user/max_inotify_instances", "/proc/sys/fs/inotify/max_user_instances"},
  {"/proc/sys/user/max_inotify_watches", "/proc/sys/fs/inotify/max_user_watches"},
};
#define SHARE 8                        // of these, the part of it that a sandbox may have
#define KINDS (sizeof shared / sizeof *shared)
static char shares[KINDS][24];
static volatile int limited;           // the process wrote them, or could not

static int hold(void *parent) {
  // nobody else ends it when the launcher is killed right now
  if (!prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) && getppid() == *(const pid_t *)parent) {
    for (unsigned i = 0; i < KINDS; i++) (void)write_at(AT_FDCWD, shared[i][0], shares[i]);
    limited = 1;
    for (;;) pause();
  }
  return 0;
}

static int make(uint32_t base, struct fault *f) {
  static const char *const files[] = {"uid_map", "gid_map"};
  static pid_t self;
  limited = 0;
  for (unsigned i = 0; i < KINDS; i++) {
    uint64_t all = 0;
    read_u64(AT_FDCWD, shared[i][1], &all);
    snprintf(shares[i], sizeof shares[i], "%llu", (unsigned long long)(all / SHARE > 1 ? all / SHARE : 1));
  }
  char path[64], map[64];
  int fd = -1;
  self = getpid();
  // a namespace needs a process to be born with; this one shares our memory and descriptors, so it is cheap, and only waits
  pid_t pid = clone(hold, stack + sizeof stack, CLONE_NEWUSER | CLONE_VM | CLONE_FILES | SIGCHLD, &self);
  if (pid < 0) return fault_lack(f, errno == EAGAIN ? "processes" : "namespaces", errno, "make a user namespace");
  while (!limited && !kill(pid, 0)) sched_yield();       // it shares our errno, too
  snprintf(map, sizeof map, "0 %u 65536", base);
  for (int i = 0; i < 2 && !f->code; i++) {
    snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
    if (write_at(AT_FDCWD, path, map)) fault_host(f, errno, "map the ids from %u on", base);
  }
  snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
  if (!f->code && (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) fault_host(f, errno, "open the user namespace");
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);               // before its stack serves again; the kernel reaps it, as the launcher ignores SIGCHLD
  return fd;
}

int userns_get(uint32_t base, struct fault *f) {
  for (unsigned i = 0; i < used; i++)
    if (kept[i].base == base) return kept[i].fd;
  int fd = make(base, f);
  if (fd < 0) return -1;
  unsigned at = used < KEPT ? used++ : next++ % KEPT;
  if (kept[at].fd > 0) close(kept[at].fd);               // sandboxes that use it hold it themselves
  kept[at].base = base;
  kept[at].fd = fd;
  return fd;
}

void userns_forget(int but) {
  for (unsigned i = 0; i < used; i++)
    if (kept[i].fd != but) close(kept[i].fd);
  used = 0;
}
