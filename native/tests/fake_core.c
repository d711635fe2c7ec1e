// prctl(PR_SCHED_CORE) for kernels without it: cookies by pid in shared memory. A process has what its parent had, as with the kernel.
#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <unistd.h>

#define CORE 62
enum { GET, CREATE, SHARE_TO, SHARE_FROM };
#define MOST 256

struct fake { int32_t answer, n; uint64_t last, changes; struct { int64_t pid; uint64_t cookie; } task[MOST]; }; // answer: an errno
static struct fake *kernel;
int __real_prctl(int option, ...);
int __wrap_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);

static uint64_t *entry(pid_t pid) {
  for (int i = 0; i < kernel->n; i++)
    if (kernel->task[i].pid == pid) return &kernel->task[i].cookie;
  return NULL;
}

static uint64_t *own(void) {
  if (!entry(getpid())) {
    uint64_t *parent = entry(getppid()), cookie = parent ? *parent : 0;
    int at = __sync_fetch_and_add(&kernel->n, 1);
    assert(at < MOST);
    kernel->task[at].cookie = cookie;
    kernel->task[at].pid = getpid();
  }
  return entry(getpid());
}

static int fake_core(unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
  errno = kernel->answer;
  if (errno) return -1;
  assert(c == 0);                      // one task
  if (a == GET) {
    assert(!b);
    *(uint64_t *)d = *own();
    return 0;
  }
  if (a == CREATE) {
    assert(!b && !d);
    *own() = __sync_add_and_fetch(&kernel->last, 1);
  } else {
    assert(a == SHARE_FROM && b && !d);
    errno = ESRCH;
    if (kill((pid_t)b, 0)) return -1;
    *own() = entry((pid_t)b) ? *entry((pid_t)b) : 0;
  }
  __sync_fetch_and_add(&kernel->changes, 1);
  return 0;
}
