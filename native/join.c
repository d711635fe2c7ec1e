// Loaded into criu before anything else runs in it: moves it into the mount namespace of a sandbox (and into its user namespace, when it shall
// have no right on the host) only when all libraries are loaded and set up. What an agent put at the paths from which a loader or a library
// takes code or settings is so never looked at. And criu likes to run programs, `sh -c iptables` to begin with, which inside are the agent's:
// here it runs none. Freestanding, as it meets another libc than ours.
#include <errno.h>
#include <linux/securebits.h>
#include <asm/socket.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define SANDBOX 100                    // the pidfd of PID 1, as in criu.c
#define NEWNS 0x00020000
#define NEWUSER 0x10000000

static long call(long number, long a, long b, long c, long d, long e) {
#if defined __x86_64__
  long r;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  __asm__ volatile("syscall" : "=a"(r) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
  return r;
#elif defined __aarch64__
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
  return x0;
#else
#error "no system call for this architecture"
#endif
}

static int refused(void) {
  errno = EPERM;
  return -1;
}

// What criu and its libraries call. A filter of system calls cannot do this: who has one may not suspend that of a tracee.
int execve(const char *path, char *const *argv, char *const *env) { (void)path; (void)argv; (void)env; return refused(); }
int execv(const char *path, char *const *argv) { (void)path; (void)argv; return refused(); }
int execvp(const char *file, char *const *argv) { (void)file; (void)argv; return refused(); }
int execvpe(const char *file, char *const *argv, char *const *env) { (void)file; (void)argv; (void)env; return refused(); }
int fexecve(int fd, char *const *argv, char *const *env) { (void)fd; (void)argv; (void)env; return refused(); }
int execl(const char *path, const char *arg, ...) { (void)path; (void)arg; return refused(); }
int execlp(const char *file, const char *arg, ...) { (void)file; (void)arg; return refused(); }
int execle(const char *path, const char *arg, ...) { (void)path; (void)arg; return refused(); }
int system(const char *text) { (void)text; return refused(); }
void *popen(const char *text, const char *type) { (void)text; (void)type; refused(); return NULL; }
int posix_spawn(void *pid, const char *path, const void *actions, const void *attr, char *const *argv, char *const *env) {
  (void)pid; (void)path; (void)actions; (void)attr; (void)argv; (void)env;
  return EPERM;
}
int posix_spawnp(void *pid, const char *file, const void *actions, const void *attr, char *const *argv, char *const *env) {
  return posix_spawn(pid, file, actions, attr, argv, env);
}
void *dlopen(const char *path, int flags) { (void)path; (void)flags; return NULL; }

// Since Linux 6.16 a socket that can have no credentials says so when it is asked for them, which criu 4.1 takes for a failure.
int getsockopt(int fd, int level, int option, void *value, unsigned *size) {
  long r = call(SYS_getsockopt, fd, level, option, (long)value, (long)size);
  if (r == -EOPNOTSUPP && level == SOL_SOCKET && (option == SO_PASSCRED || option == SO_PASSSEC) && *size == sizeof(int)) {
    *(int *)value = 0;
    return 0;
  }
  if (r >= 0) return 0;
  errno = (int)-r;
  return -1;
}

// glibc gives these three to every constructor
static void __attribute__((constructor)) join(int argc, char **argv, char **env) {
  (void)argc;
  (void)argv;
  int user = 0;
  for (; *env; env++) {
    const char *want = "DSEC_JOIN=user", *have = *env;
    while (*want && *want == *have) want++, have++;
    if (!*want) user = 1;
  }
  long bad = call(SYS_setns, SANDBOX, NEWNS, 0, 0, 0);
  if (!bad && user)
    bad = call(SYS_setns, SANDBOX, NEWUSER, 0, 0, 0) || call(SYS_setgroups, 0, 0, 0, 0, 0) || call(SYS_setresgid, 0, 0, 0, 0, 0) ||
          call(SYS_setresuid, 0, 0, 0, 0, 0) || call(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
  // should it run something in spite of that: root alone gives no right to a program
  if (!bad && !user) bad = call(SYS_prctl, PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED, 0, 0, 0);
  if (bad) call(SYS_exit_group, 120, 0, 0, 0, 0);
  call(SYS_close, SANDBOX, 0, 0, 0, 0);
}
