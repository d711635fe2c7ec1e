// A process of criu inside a sandbox, of another Debian than the host's: its loader, libraries and program come from a tree of their own
// (node.criu), which it sees as a mount with nothing above it. It joins the mount namespace last of all (join.c).
//
// To dump it needs the rights of the host: the seccomp filters and the mapped files of a process are shown to nobody else. To restore it has
// none: it is root of the sandbox's user namespace, in the sandbox's groups, and what it makes can be no more than that.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

enum { AT_SANDBOX = 100, AT_ROOT, AT_IMAGES, AT_JOIN, AT_GROUP, AT_CACHE, AT_GATE, AT_PARENT, AT_END = CRIU_PIPE };
_Static_assert((int)AT_GROUP == (int)CRIU_GROUP, "the arguments name it");
#define HIGH 200                       // descriptors on their way to a fixed number wait above this
#define LAST_PID "/proc/sys/kernel/ns_last_pid"
#define FD(n) "/proc/self/fd/" #n
#define MOST_ARGS 32

struct report { int32_t kind, value; };
enum { R_PID, R_LAST, R_FAULT };

static void __attribute__((noreturn)) tell(int to, int kind, int value) {
  struct report r = {kind, value};
  _exit(write(to, &r, sizeof r) == sizeof r ? 1 : 2);
}

struct given { int images, parent, gate, report; };     // parent: pidfd of ours

static int place(const struct sandbox *s, const struct criu *c, const struct given *g) {
  int from[] = {s->box->null, c->log, c->log, s->init_fd, node.criu, g->images, node.join, s->cgroup_fd, node.cache,
                g->gate >= 0 ? g->gate : s->box->null, g->parent, c->pipes[0], c->pipes[1], c->pipes[2]};
  static const int to[] = {0, 1, 2, AT_SANDBOX, AT_ROOT, AT_IMAGES, AT_JOIN, AT_GROUP, AT_CACHE, AT_GATE, AT_PARENT, AT_END, AT_END + 1, AT_END + 2};
  int n = (int)(sizeof to / sizeof *to) - CRIU_PIPES + c->npipes;
  for (int i = 0; i < n; i++)
    if ((from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, HIGH)) < 0) return -1;
  int keep = fcntl(g->report, F_DUPFD_CLOEXEC, HIGH + 100);
  if (keep < 0) return -1;
  for (int i = 0; i < n; i++)
    if (dup2(from[i], to[i]) < 0) return -1;
  return close_range(3, AT_SANDBOX - 1, 0) || close_range(AT_END + (unsigned)c->npipes, (unsigned)keep - 1, 0) || close_range((unsigned)keep + 1, ~0u, 0)
           ? -1 : keep;
}

// Not that the rest were harmless: who may trace and administer may do most things. But no module, device, clock or BPF program.
static int cut_rights(void) {
  static const int needed[] = {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_NET_ADMIN,
                               CAP_IPC_OWNER, CAP_SYS_CHROOT, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE};
  uint64_t keep = 0;
  for (unsigned i = 0; i < sizeof needed / sizeof *needed; i++) keep |= 1ull << needed[i];
  for (int c = 0; c < 64; c++)         // beyond the kernel's last one: EINVAL
    if (!(keep >> c & 1) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0)) return errno == EINVAL ? 0 : -1;
  return 0;
}

// In the pid namespace. That it dies with us is join.c's to see to: what it does there with its rights would undo it.
static void __attribute__((noreturn)) second(const struct sandbox *s, const struct criu *c, const struct given *g) {
  char text[32], most[40];
  int report = g->report;
  const char *argv[MOST_ARGS] = {"criu", "--preload", FD(103), "--inhibit-cache", "--library-path", FD(101) "/lib", FD(101) "/criu"};
  static const char *const fixed[] = {"-D", FD(102), "-v1", "--no-default-config", "--libdir", FD(101) "/plugins", "--unprivileged", "--manage-cgroups=ignore"};
  char *const env[][4] = {
    {(char *)"XDG_RUNTIME_DIR=" FD(105), (char *)"GNUTLS_SYSTEM_PRIORITY_FILE=" FD(101) "/none", most, NULL},
    {(char *)"XDG_RUNTIME_DIR=" FD(102), (char *)"GNUTLS_SYSTEM_PRIORITY_FILE=" FD(101) "/none", (char *)"DSEC_JOIN=user", NULL}};
  snprintf(most, sizeof most, "DSEC_MOST=%llu", (unsigned long long)c->most);
  int last = open(LAST_PID, O_RDWR | O_CLOEXEC);
  if (last < 0) tell(report, R_FAULT, errno);
  if (c->restore && c->last_pid) {     // its helpers come behind it
    int n = snprintf(text, sizeof text, "%d", c->last_pid + 1);
    if (pwrite(last, text, (size_t)n, 0) != n) tell(report, R_FAULT, errno);
  } else if (!c->restore) {
    ssize_t n = pread(last, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    struct report r = {R_LAST, atoi(text)};
    if (write(report, &r, sizeof r) != sizeof r) _exit(2);
  }
  int end = 7;
  argv[end++] = c->args[0];
  for (unsigned i = 0; i < sizeof fixed / sizeof *fixed; i++) argv[end++] = fixed[i];
  for (int i = 1; c->args[i] && end < MOST_ARGS - 1; i++) argv[end++] = c->args[i];
  if (!c->restore && cut_rights()) tell(report, R_FAULT, errno);
  if ((report = place(s, c, g)) < 0) _exit(2);
  int ld = openat(AT_ROOT, "ld.so", O_RDONLY | O_CLOEXEC);
  if (ld < 0) tell(report, R_FAULT, errno);
  umask(077);
  execveat(ld, "", (char *const *)(uintptr_t)argv, env[c->restore], AT_EMPTY_PATH);
  tell(report, R_FAULT, errno);
}

static void __attribute__((noreturn)) first(struct sandbox *s, const struct criu *c, const struct given *g) {
  int report = g->report;
  int spaces = CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWPID;
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  for (int i = 0; c->restore && i < CG_COUNT; i++)
    if (s->box->join[i] >= 0 && write(s->box->join[i], "0", 1) != 1) tell(report, R_FAULT, errno);
  // what it restores has the nice value of the dump, and later it has no right to leave its supervisor's
  if (c->restore) setpriority(PRIO_PROCESS, 0, 0);
  if (setns(s->init_fd, spaces)) tell(report, R_FAULT, errno);
  pid_t beyond = c->last_pid + 1;      // neither it nor its helpers may have a pid that a task had
  struct clone_args a = {.flags = CLONE_PARENT | CLONE_CLEAR_SIGHAND};
  if (c->restore && c->last_pid) a.set_tid = (uint64_t)(uintptr_t)&beyond, a.set_tid_size = 1;
  pid_t pid = sys_clone3(&a);
  if (!pid) second(s, c, g);
  tell(report, pid < 0 ? R_FAULT : R_PID, pid < 0 ? errno : pid);
}

pid_t criu_start(struct sandbox *s, struct criu *c, int *pidfd, struct fault *f) {
  int report[2] = {-1, -1}, gate[2] = {-1, -1};
  pid_t pid = -1;
  struct report r;
  int images = open_tree(AT_FDCWD, c->images, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC), self = sys_pidfd_open(getpid()), err = 0;
  struct mount_attr ro = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};
  if (images < 0 || self < 0 || (c->restore && mount_setattr(images, "", AT_EMPTY_PATH, &ro, sizeof ro)) || pipe2(report, O_CLOEXEC) ||
      (c->restore && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, gate))) {
    fault_host(f, errno, "open the images in %s", c->images);
    close_fd(&images);
    close_fd(&self);
    close_fd(&report[0]);
    close_fd(&report[1]);
    return -1;
  }
  struct given given = {images, self, gate[1], report[1]};
  struct clone_args a = {.flags = c->restore ? CLONE_INTO_CGROUP : 0, .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)c->group};
  pid_t starter = sys_clone3(&a);
  if (!starter) first(s, c, &given);
  if (starter < 0) err = errno;
  close(report[1]);
  close(images);
  close(self);
  close_fd(&gate[1]);
  // the end of the pipe comes with the exec
  while (starter > 0 && read(report[0], &r, sizeof r) == sizeof r) {
    if (r.kind == R_PID) pid = r.value;
    else if (r.kind == R_LAST) c->last_pid = r.value;
    else err = r.value;
  }
  close(report[0]);
  while (starter > 0 && waitpid(starter, NULL, 0) < 0 && errno == EINTR) {}
  c->gate = gate[0];
  if (!err && pid > 0 && (*pidfd = sys_pidfd_open(pid)) >= 0) return pid;
  close_fd(&c->gate);
  if (pid > 0) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
  }
  return fault_host(f, err ? err : errno, "start criu in %s", s->spec.id);
}

void criu_reason(int log, char *to, size_t cap) {
  static char text[65536];
  ssize_t n = pread(log, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  snprintf(to, cap, "it does not say why");
  for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
    *end = 0;
    char *what = strstr(line, "Error (");
    if (!what || strstr(what, "RLIMIT_NOFILE") || strstr(what, "suspend") || strstr(what, "detach") || !(what = strstr(what, "): "))) continue;
    what += 2;
    snprintf(to, cap, "%s", what + strspn(what, " \t"));
    for (char *p = to; *p; p++)
      if (*p == '\t') *p = ' ';
      else if (*p < ' ' || *p > '~') *p = '?';                // it may name what an agent made
    return;
  }
}
