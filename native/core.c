// Core scheduling by class: tasks whose cookies differ never run on two threads of one core at the same time, so that best effort takes
// nothing of a core whose other thread serves the latency class. A cookie lives in the tasks that have it. A process each holds those of
// the two classes for the launcher; a supervisor takes its class's before it makes anything, and whatever it makes inherits it.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#ifndef PR_SCHED_CORE
#define PR_SCHED_CORE 62
#define PR_SCHED_CORE_GET 0
#define PR_SCHED_CORE_CREATE 1
#define PR_SCHED_CORE_SHARE_FROM 3
#endif
#define ONE_TASK 0ul                   // not its thread group, not its process group

static int present;

static int core_call(unsigned long what, pid_t pid, uint64_t *value) { return prctl(PR_SCHED_CORE, what, (unsigned long)pid, ONE_TASK, (unsigned long)value); }

static uint64_t cookie(void) {
  uint64_t value = 0;
  return core_call(PR_SCHED_CORE_GET, 0, &value) ? 0 : value;
}

// It ends with the launcher. Supervisors keep the cookie, and the next launcher has it from one of them.
static void __attribute__((noreturn)) holder(pid_t from, pid_t parent, int status) {
  prctl(PR_SET_NAME, "core", 0, 0, 0);
  int bad = prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || getppid() != parent;
  // who had it may be gone, and its number another's
  if (!bad && (from <= 0 || core_call(PR_SCHED_CORE_SHARE_FROM, from, NULL) || !cookie())) bad = core_call(PR_SCHED_CORE_CREATE, 0, NULL);
  int err = bad ? errno : 0;
  if (write(status, &err, sizeof err) != sizeof err || bad) _exit(1);
  close_range(0, ~0u, 0);
  for (;;) pause();
}

int core_hold(int class, pid_t from, struct fault *f) {
  struct pollfd dead = {.fd = node.core[class].fd, .events = POLLIN};
  if (!present || (dead.fd >= 0 && poll(&dead, 1, 0) <= 0)) return 0;
  int status[2], err = EPIPE;
  pid_t self = getpid();
  close_fd(&node.core[class].fd);
  if (pipe2(status, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  pid_t pid = fork();
  if (!pid) holder(from, self, status[1]);
  close(status[1]);
  if (pid > 0 && read(status[0], &err, sizeof err) == sizeof err && !err) node.core[class].fd = sys_pidfd_open(pid);
  close(status[0]);
  node.core[class].pid = pid;
  return node.core[class].fd < 0 ? fault_host(f, pid < 0 ? errno : err, "hold the core scheduling cookie of class %d", class) : 0;
}

int core_open(const pid_t *from, struct fault *f) {
  uint64_t value;
  for (int class = 0; class < CPU_CLASSES; class++) node.core[class].fd = -1;
  present = !core_call(PR_SCHED_CORE_GET, 0, &value);    // else not in this kernel (EINVAL), or no core here has two threads (ENODEV)
  for (int class = 0; class < CPU_CLASSES; class++)
    if (core_hold(class, from[class], f)) return -1;
  return 0;
}

int core_take(int class, struct fault *f) {
  int bad = node.core[class].fd >= 0 && core_call(PR_SCHED_CORE_SHARE_FROM, node.core[class].pid, NULL);
  int err = errno;
  for (int i = 0; i < CPU_CLASSES; i++) close_fd(&node.core[i].fd);
  return bad ? fault_host(f, err, "take the core scheduling cookie of class %d", class) : 0;
}
