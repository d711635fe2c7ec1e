// sandbox.h on the plain host, without namespaces: fork and exec. For unit tests and sanitizers, which need no root; with root and a v2
// tree the commands get real cgroups, so that kills reach whole trees.
#include "../node.h"
#include "../start.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "no_criu.c"

struct host { uint64_t oom_kills, pids_hits; int disk_full, replaced; };    // what a test makes the kernel say
extern struct host *host;
struct host *host;
static char host_group[128];           // "": no v2 tree

static void host_init(void) {
  host = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (host == MAP_FAILED) abort();
}

// A sandbox whose PID 1 sleeps; `dir` holds its socket, logs and, without a v2 tree, directories that stand for groups.
static void host_sandbox(struct sandbox *s, const char *dir) {
  static char run[128], state[128];
  snprintf(run, sizeof run, "%s", dir);
  snprintf(state, sizeof state, "%s/state", dir);
  mkdir(state, 0700);
  s->spec.id = "hosttest000000000000";
  s->spec.run_dir = run;
  s->spec.state_dir = state;
  if (!s->spec.log_head) { s->spec.log_head = 64 << 10; s->spec.log_tail = 64 << 10; s->spec.log_budget = 64 << 20; }
  if (!s->spec.pids) s->spec.pids = 2000;
  snprintf(host_group, sizeof host_group, "/sys/fs/cgroup/unified/dsec-unit-%d", getpid());
  if (mkdir(host_group, 0755)) {
    snprintf(host_group, sizeof host_group, "/sys/fs/cgroup/dsec-unit-%d", getpid());
    if (access("/sys/fs/cgroup/cgroup.procs", F_OK) || mkdir(host_group, 0755)) host_group[0] = 0;
  }
  s->cgroup_fd = open(*host_group ? host_group : state, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  s->init = fork();
  if (!s->init) { signal(SIGTERM, SIG_DFL); for (;;) pause(); }
  s->init_fd = (int)syscall(SYS_pidfd_open, s->init, 0);
  s->oom_fd = -1;
  struct stat st;
  s->has_shell = 1;
  if (!stat("/bin/bash", &st)) s->bash = (struct file_id){.dev = st.st_dev, .ino = st.st_ino};
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", dir);
  s->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (bind(s->listen_fd, (struct sockaddr *)&a, sizeof a) || listen(s->listen_fd, 512)) { perror(a.sun_path); abort(); }
}

void sandbox_kill(struct sandbox *s) {
  if (s->init <= 0) return;
  kill(s->init, SIGKILL);
  waitpid(s->init, NULL, 0);
  s->init = 0;
}

void sandbox_remove(struct sandbox *s) {
  char path[160];
  snprintf(path, sizeof path, "%s/aether.sock", s->spec.run_dir);
  unlink(path);
  if (*host_group) rmdir(host_group);
}

void sandbox_rest(struct sandbox *s) { (void)s; }

void sandbox_usage(struct sandbox *s, struct usage *u) {
  (void)s;
  *u = (struct usage){.memory = 1, .memory_peak = 4242, .pids = 1, .oom_kills = host->oom_kills, .pids_hits = host->pids_hits};
}
uint64_t sandbox_oom_kills(struct sandbox *s) { (void)s; return host->oom_kills; }
uint64_t sandbox_pids_hits(struct sandbox *s) { (void)s; return host->pids_hits; }
int sandbox_disk_full(struct sandbox *s) { (void)s; return host->disk_full; }
int medium_snapshot(struct sandbox *s, const char *name, struct fault *f) { (void)s; (void)name; f->code = "internal"; return -1; }
void cgroup_usage(struct sandbox *s, struct usage *u) { (void)s; (void)u; }
void cgroup_swap(struct sandbox *s, int on) { (void)s; (void)on; }
void cgroup_reclaim(struct sandbox *s) { (void)s; }
int medium_remove(const char *name) { (void)name; return 0; }
int snapshot_named(const char *name) { return strchr(name, '.') != NULL; }
int sandbox_shell_replaced(struct sandbox *s) { (void)s; return host->replaced; }
int sandbox_rename(struct sandbox *s, const char *hostname, struct fault *f) { (void)f; s->spec.hostname = hostname; return 0; }

static void __attribute__((noreturn)) fail(int status, const char *code, const char *what) {
  struct fault f = {.code = code, .err = errno};
  snprintf(f.message, sizeof f.message, "%s: %s", what, strerror(errno));
  (void)!write(status, &f, sizeof f);
  _exit(127);
}

static void __attribute__((noreturn)) child(const struct entry *e, int status) {
  int in = e->in >= 0 ? e->in : open("/dev/null", O_RDONLY), out = e->out, errfd = e->err;
  if (*host_group) {
    int fd = openat(e->cgroup_fd, "cgroup.procs", O_WRONLY);
    if (fd < 0 || write(fd, "0", 1) != 1) fail(status, "internal", "cgroup.procs");
    close(fd);
  }
  if (e->run) { close(status); e->run(e->arg); _exit(0); }
  setsid();
  if (e->tty) ioctl(e->in, TIOCSCTTY, 0);
  if (out < 0) out = open("/dev/null", O_WRONLY);
  if (errfd < 0) errfd = out;
  // none of ours is below 3, or the harness broke
  dup2(in, 0);
  dup2(out, 1);
  dup2(errfd, 2);
  if (e->ctl >= 0) {
    if (e->ctl == e->ctl_as) fcntl(e->ctl, F_SETFD, 0);
    else { if (status == e->ctl_as) status = fcntl(status, F_DUPFD_CLOEXEC, 20); dup2(e->ctl, e->ctl_as); }
  }
  if (e->cwd && chdir(e->cwd)) fail(status, "cwd_not_found", e->cwd);
  for (const char *const *v = e->env; v && *v; v++) putenv((char *)*v);
  const char *shell[] = {"bash", "-c", e->shell_text, NULL};
  const char *const *argv = e->shell_text ? shell : e->argv;
  execvp(argv[0], (char *const *)argv);
  fail(status, errno == ENOENT ? "binary_not_found" : "not_executable", argv[0]);
}

int sandbox_enter(struct sandbox *s, const struct entry *e, struct start *st, struct fault *f) {
  (void)s;
  int status;
  starts_reap();
  if (start_open(st, &status, f)) abort();
  st->pid = fork();
  if (!st->pid) child(e, status);
  close(status);
  st->pidfd = (int)syscall(SYS_pidfd_open, st->pid, 0);
  fcntl(st->pidfd, F_SETFD, FD_CLOEXEC);
  return 0;
}

int sandbox_pty(struct sandbox *s, int rows, int cols, int *slave, struct fault *f) {
  (void)s; (void)f;
  int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  grantpt(master);
  unlockpt(master);
  *slave = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
  struct winsize w = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
  ioctl(master, TIOCSWINSZ, &w);
  return master;
}
