// Core scheduling by class: two cookies, each with all of its class, whatever dies. By the kernel where it has core scheduling, else by a fake.
#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#include "fake_core.c"

struct node node;

int __wrap_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
  return option == CORE && kernel ? fake_core(a, b, c, d) : __real_prctl(option, a, b, c, d);
}

static uint64_t cookie_of(pid_t pid) {  // the real kernel tells of others, too
  uint64_t cookie = 0;
  if (kernel) return entry(pid) ? *entry(pid) : 0;
  assert(!__real_prctl(CORE, GET, (unsigned long)pid, 0ul, &cookie));
  return cookie;
}

static const pid_t nobody[CPU_CLASSES];

// A supervisor of the class, with a child as its sandbox: its pid, and the child's by way of `inside`.
static pid_t supervisor(int class, pid_t *inside) {
  struct fault f = {0};
  int pipes[2];
  assert(!pipe(pipes));
  pid_t pid = fork();
  if (!pid) {
    assert(!core_take(class, &f) && node.core[0].fd < 0 && node.core[1].fd < 0);
    pid_t child = fork();
    if (!child) {
      if (kernel) own();
      child = getpid();
      assert(write(pipes[1], &child, sizeof child) == sizeof child);
    }
    for (;;) pause();
  }
  assert(pid > 0 && read(pipes[0], inside, sizeof *inside) == sizeof *inside);
  close(pipes[0]);
  close(pipes[1]);
  return pid;
}

static void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
}

static void absent(int answer) {
  struct fault f = {0};
  kernel->answer = answer;
  assert(!core_open(nobody, &f) && node.core[0].fd < 0 && node.core[1].fd < 0);
  assert(!core_hold(CPU_LATENCY, 0, &f) && !core_take(CPU_LATENCY, &f));
  assert(!kernel->changes);
  kernel->answer = 0;
}

static void by_class(void) {
  struct fault f = {0};
  pid_t in[3], up[3];
  assert(!core_open(nobody, &f));
  uint64_t latency = cookie_of(node.core[CPU_LATENCY].pid), best = cookie_of(node.core[CPU_BEST_EFFORT].pid);
  assert(latency && best && latency != best);
  up[0] = supervisor(CPU_LATENCY, &in[0]);
  up[1] = supervisor(CPU_LATENCY, &in[1]);
  up[2] = supervisor(CPU_BEST_EFFORT, &in[2]);
  assert(cookie_of(up[0]) == latency && cookie_of(in[0]) == latency && cookie_of(in[1]) == latency);
  assert(cookie_of(up[2]) == best && cookie_of(in[2]) == best);
  assert(!cookie_of(getpid()));        // the launcher itself is of no class
  pid_t before = node.core[CPU_LATENCY].pid;
  assert(!core_hold(CPU_LATENCY, 0, &f) && node.core[CPU_LATENCY].pid == before);

  // the launcher is gone, and its holders with it; the next one is told who lives
  for (int class = 0; class < CPU_CLASSES; class++) end(node.core[class].pid);
  pid_t from[CPU_CLASSES] = {up[1], in[2]};
  assert(!core_open(from, &f));
  assert(cookie_of(node.core[CPU_LATENCY].pid) == latency && cookie_of(node.core[CPU_BEST_EFFORT].pid) == best);

  // a holder that died; nobody of the class lives; the number is another's, without a cookie
  end(node.core[CPU_LATENCY].pid);
  assert(!core_hold(CPU_LATENCY, up[0], &f) && cookie_of(node.core[CPU_LATENCY].pid) == latency);
  end(node.core[CPU_LATENCY].pid);
  assert(!core_hold(CPU_LATENCY, getpid(), &f));
  uint64_t anew = cookie_of(node.core[CPU_LATENCY].pid);
  assert(anew && anew != latency && anew != best);
  for (int i = 0; i < 3; i++) { kill(in[i], SIGKILL); end(up[i]); }

  // who holds the cookie died since: its supervisor is refused, not made without
  end(node.core[CPU_BEST_EFFORT].pid);
  pid_t pid = fork();
  if (!pid) _exit(core_take(CPU_BEST_EFFORT, &f) && strstr(f.message, "class 1") ? 0 : 1);
  int status;
  assert(waitpid(pid, &status, 0) == pid && !status);
  end(node.core[CPU_LATENCY].pid);
}

// A holder ends with its launcher, however that ends.
static void with_launcher(void) {
  struct fault f = {0};
  int pipes[2];
  pid_t holders[CPU_CLASSES];
  assert(!pipe(pipes));
  pid_t launcher = fork();
  if (!launcher) {
    assert(!core_open(nobody, &f));
    for (int class = 0; class < CPU_CLASSES; class++) holders[class] = node.core[class].pid;
    assert(write(pipes[1], holders, sizeof holders) == sizeof holders);
    for (;;) pause();
  }
  assert(read(pipes[0], holders, sizeof holders) == sizeof holders);
  __real_prctl(PR_SET_CHILD_SUBREAPER, 1ul, 0ul, 0ul, 0ul);
  end(launcher);
  for (int class = 0; class < CPU_CLASSES; class++) assert(waitpid(holders[class], NULL, 0) == holders[class]);
}

int main(void) {
  uint64_t cookie;
  node.core[0].fd = node.core[1].fd = -1;
  if (__real_prctl(CORE, GET, 0ul, 0ul, &cookie)) {
    kernel = mmap(NULL, sizeof *kernel, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert(kernel != MAP_FAILED);
    absent(EINVAL);                    // not in the kernel
    absent(ENODEV);                    // no core has two threads
    memset(kernel, 0, sizeof *kernel);
  }
  by_class();
  with_launcher();
  printf("core scheduling: %s\n", kernel ? "by a fake, this kernel has none" : "by this kernel");
  return 0;
}
