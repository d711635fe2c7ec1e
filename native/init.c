// PID 1 of every sandbox. It ignores SIGCHLD, so the kernel reaps for it every process that was orphaned, and then sleeps for ever:
// it has no descriptor, no capability, no libc. Signals from inside never reach it: it installs no handler, and the kernel drops what
// PID 1 does not handle.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static long call(long n, long a, long b, long c, long d) {
  long r;
  register long r10 __asm__("r10") = d;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
  return r;
}

void _start(void) {
  static const struct { long handler, flags, restorer, mask; } ignore = {1 /* SIG_IGN */, 0, 0, 0};
  call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0);             // nobody inside may trace it or look into it
  call(SYS_prctl, PR_SET_NAME, (long)"init", 0, 0);
  call(SYS_rt_sigaction, SIGCHLD, (long)&ignore, 0, sizeof ignore.mask);
  for (;;) call(SYS_pause, 0, 0, 0, 0);
}
