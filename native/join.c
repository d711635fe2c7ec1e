// Loaded into criu before anything else runs in it: moves it into the mount namespace of a sandbox (and into its user namespace, when it shall
// have no right on the host) only when all libraries are loaded and set up. What an agent put at the paths from which a loader or a library
// takes code or settings is so never looked at. And criu likes to run programs, `sh -c iptables` to begin with, which inside are the agent's:
// here it runs none. What it asks of the tasks and how much it writes goes through here, too. Freestanding, as it meets another libc than ours.
#include <errno.h>
#include <linux/securebits.h>
#include <asm/socket.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

enum { SANDBOX = 100, GATE = 106, PARENT };    // the pidfd of PID 1, the way to ask aether, aether's pidfd; as in criu.c
#define NEWNS 0x00020000
#define NEWUSER 0x10000000

static long call6(long number, long a, long b, long c, long d, long e, long f) {
#if defined __x86_64__
  long r;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall" : "=a"(r) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return r;
#elif defined __aarch64__
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
#else
#error "no system call for this architecture"
#endif
}

static long call(long number, long a, long b, long c, long d, long e) { return call6(number, a, b, c, d, e, 0); }

static long result(long r) {
  if (r >= 0) return r;
  errno = (int)-r;
  return -1;
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
  return (int)result(r);
}

// ---- tasks ------------------------------------------------------------------------------------------------------------------------------

// sys/ptrace.h declares ptrace, and not as we have to
enum { PEEK_FIRST = 1, PEEKDATA = 2, PEEK_LAST = 3, POKEDATA = 5, DETACH = 17, SETOPTIONS = 0x4200, SEIZE = 0x4206, RSEQ = 0x420f };
#define SUSPEND_SECCOMP (1l << 21)
#define RSEQ_CS 8                      // of struct rseq: where the critical section that the thread may be in is described
struct rseq_registration { uint64_t at; uint32_t size, signature, flags, zero; };

static int restores, let_go;           // let_go: aether was asked
static struct { pid_t thread; uint64_t at; } sequence;   // of the thread that criu looks at now

// A critical section makes the kernel jump to an address of the task's choice when code in a range of its choice is interrupted: criu's own code
// in the task, while it dumps, and with root's rights over the sandbox, while it restores. criu has read what it needs: the kernel would clear
// this itself as soon as the thread ran on.
static int forget_sequence(void) {
  uint64_t at = sequence.at;
  sequence.at = 0;
  long r = !at ? 0 : call(SYS_ptrace, POKEDATA, sequence.thread, (long)at, 0, 0);
  return r && r != -ESRCH ? (int)result(r) : 0;          // it has died, as one does with which criu tries the kernel out
}

// All tasks are there, with the rights that they shall have, and stand still: from here on they may be let go, into a frozen group.
static int ask(void) {
  char byte = 0;
  long r = call(SYS_write, GATE, (long)&byte, 1, 0, 0);
  if (r == 1) r = call(SYS_read, GATE, (long)&byte, 1, 0, 0);
  if (r == 1) return 0;
  errno = EPERM;
  return -1;
}

long ptrace(int request, ...) {
  va_list list;
  va_start(list, request);
  pid_t thread = va_arg(list, pid_t);
  long at = (long)va_arg(list, void *), data = (long)va_arg(list, void *), word = 0;
  va_end(list);
  int peek = request >= PEEK_FIRST && request <= PEEK_LAST;
  if (request != PEEKDATA && forget_sequence()) return -1;
  // the filter stays in force: it allows what criu's code in a task does, and whoever gets in between has no more than the task has
  if (request == SETOPTIONS || request == SEIZE) data &= ~SUSPEND_SECCOMP;
  if (request == DETACH && restores && !let_go) {
    if (ask()) return -1;
    let_go = 1;
  }
  long r = call(SYS_ptrace, request, thread, at, peek ? (long)&word : data, 0);
  if (request == RSEQ && r >= (long)sizeof(struct rseq_registration)) {
    const struct rseq_registration *c = (const struct rseq_registration *)data;
    if (c->at) sequence.thread = thread, sequence.at = c->at + RSEQ_CS;
  }
  if (r < 0 || !peek) return result(r);
  errno = 0;
  return word;
}

// ---- what it writes -----------------------------------------------------------------------------------------------------------------------

#define ORDER 16                       // bytes at most of what tells the kernel to do something, which is no image

static uint64_t left = UINT64_MAX;     // bytes

// criu ends in order when the disk is full, and the tasks run on.
static long wrote(long r) {
  static const char said[] = "Error (join.c): its images would take more than they may\n";
  if (r < 0) return result(r);
  if ((uint64_t)r <= left) {
    left -= (uint64_t)r;
    return r;
  }
  left = 0;
  call(SYS_write, 2, (long)said, sizeof said - 1, 0, 0);
  errno = ENOSPC;
  return -1;
}

ssize_t write(int fd, const void *p, size_t n) {
  long r = call(SYS_write, fd, (long)p, (long)n, 0, 0);
  return n > ORDER ? wrote(r) : result(r);
}
ssize_t writev(int fd, const struct iovec *v, int n) { return wrote(call(SYS_writev, fd, (long)v, n, 0, 0)); }
ssize_t sendfile(int to, int from, off_t *at, size_t n) { return wrote(call(SYS_sendfile, to, from, (long)at, (long)n, 0)); }
ssize_t sendfile64(int to, int from, off_t *at, size_t n) { return sendfile(to, from, at, n); }
ssize_t splice(int from, off_t *from_at, int to, off_t *to_at, size_t n, unsigned flags) {
  return wrote(call6(SYS_splice, from, (long)from_at, to, (long)to_at, (long)n, flags));
}

// ---------------------------------------------------------------------------------------------------------------------------------------------

static int is(const char *have, const char *want, const char **rest) {
  while (*want && *want == *have) want++, have++;
  *rest = have;
  return !*want;
}

// A change of rights made the kernel forget it. Whoever died before is seen.
static long die_with_parent(void) {
  struct pollfd p = {.fd = PARENT, .events = POLLIN};
  struct timespec none = {0, 0};
  long bad = call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  return bad ? bad : call(SYS_ppoll, (long)&p, 1, (long)&none, 0, 0);
}

// glibc gives these three to every constructor
static void __attribute__((constructor)) join(int argc, char **argv, char **env) {
  (void)argc;
  (void)argv;
  for (; *env; env++) {
    const char *rest;
    if (is(*env, "DSEC_JOIN=user", &rest)) restores = 1;
    if (!is(*env, "DSEC_MOST=", &rest)) continue;
    for (left = 0; *rest >= '0' && *rest <= '9'; rest++) left = left * 10 + (uint64_t)(*rest - '0');
  }
  long bad = call(SYS_setns, SANDBOX, NEWNS, 0, 0, 0);
  if (!bad && restores)
    bad = call(SYS_setns, SANDBOX, NEWUSER, 0, 0, 0) || call(SYS_setgroups, 0, 0, 0, 0, 0) || call(SYS_setresgid, 0, 0, 0, 0, 0) ||
          call(SYS_setresuid, 0, 0, 0, 0, 0) || call(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
  // should it run something in spite of that: root alone gives no right to a program
  if (!bad && !restores) bad = call(SYS_prctl, PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED, 0, 0, 0);
  if (bad || die_with_parent()) call(SYS_exit_group, 120, 0, 0, 0, 0);
  call(SYS_close, SANDBOX, 0, 0, 0, 0);
  call(SYS_close, PARENT, 0, 0, 0, 0);
}
