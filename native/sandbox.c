// One sandbox from the supervisor's side: making it, killing it, removing it, measuring it.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include "machine.h"
#include "node.h"
#include "util.h"
#include "wire.h"

#define SETUP_MS 20000                 // a setup that takes longer has met a stuck file system

static struct box box;                 // one sandbox a process

// First of all, so that whoever has to clean up later can find this process by its socket.
static int listen_first(struct sandbox *s, struct fault *f) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  if (make_dirs(s->spec.run_dir, 0700) || make_dirs(s->spec.state_dir, 0700))
    return fault_host(f, errno, "make the directories %s and %s", s->spec.run_dir, s->spec.state_dir);
  if (snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", s->spec.run_dir) >= (int)sizeof a.sun_path)
    return fault_set(f, "invalid_request", ENAMETOOLONG, "the path of the socket in %s", s->spec.run_dir);
  s->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  mode_t mask = umask(0177);
  int bad = s->listen_fd < 0 || bind(s->listen_fd, (struct sockaddr *)&a, sizeof a) || listen(s->listen_fd, 4096);
  int err = errno;
  umask(mask);
  return bad ? fault_host(f, err, "listen on %s", a.sun_path) : 0;
}

// One message of the setup process, or EOF. 1: message, 0: EOF, -1: it failed, f says how.
static int hear(int pipe, struct sandbox *s, struct fault *f) {
  struct fault said;
  struct pollfd p = {.fd = pipe, .events = POLLIN};
  int ready;
  do ready = poll(&p, 1, SETUP_MS);
  while (ready < 0 && errno == EINTR);
  ssize_t n = ready > 0 ? read(pipe, &said, sizeof said) : -1;
  if (n == 0) return 0;
  if (n != sizeof said) return fault_set(f, "internal", 0, "the setup of %s did not end within %d s", s->spec.id, SETUP_MS / 1000);
  if (said.code) { *f = said; return -1; }
  return 1;
}

static int identify(const char *path, struct file_id *id, int *executable) {
  struct stat st;
  int fd = open_inside(box.root, path, O_PATH), lack = fd < 0 && errno_lack(errno);
  *id = (struct file_id){0};
  *executable = 0;
  if (fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode)) {
    *id = (struct file_id){.dev = st.st_dev, .ino = st.st_ino, .size = (uint64_t)st.st_size,
                           .ctime_ns = (uint64_t)st.st_ctim.tv_sec * 1000000000u + (uint64_t)st.st_ctim.tv_nsec};
    *executable = (st.st_mode & 0111) != 0;
  }
  close_fd(&fd);
  return lack ? -1 : 0;
}

// What was asked of it that its files decide.
static int fits(struct sandbox *s, struct fault *f) {
  struct account a;
  int dir = open_inside(box.root, s->spec.workdir, O_PATH | O_DIRECTORY);
  if (dir < 0 && errno_lack(errno)) return fault_host(f, errno, "open the working directory of %s", s->spec.id);
  if (dir < 0) return fault_set(f, "cwd_not_found", errno, "the working directory %.120s", s->spec.workdir);
  close_fd(&dir);
  return account_find(box.root, s->spec.user, s->userns_fd >= 0, &a, f) ? -1 : 0;
}

// What the new root must have, looked at from outside.
static int inspect_root(struct sandbox *s, struct fault *f) {
  char path[64];
  struct stat st;
  int unused;
  snprintf(path, sizeof path, "/proc/%d/root", s->init);
  if ((box.root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) return fault_host(f, errno, "open the root of %s", s->spec.id);
  box.null = open_inside(box.root, "dev/null", O_RDWR | O_NOCTTY);
  if (box.null < 0 || fstat(box.null, &st) || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(1, 3))
    return fault_host(f, errno, "open /dev/null of %s", s->spec.id);
  if ((s->devpts_fd = open_inside(box.root, "dev/pts", O_RDONLY | O_DIRECTORY)) < 0) return fault_host(f, errno, "open /dev/pts of %s", s->spec.id);
  // what it did to its own files while it ran is for its next command to say
  if (!s->spec.turn && fits(s, f)) return -1;
  return identify("bin/sh", &s->shell, &s->has_shell) || identify("bin/bash", &s->bash, &unused) ? fault_host(f, errno, "look at the shell of %s", s->spec.id) : 0;
}

// PID 1 was made by the setup process, which ends.
static int take_over(struct sandbox *s, const struct own_pids *own, struct fault *f) {
  pid_t setup = s->init;
  int fd = sys_pidfd_open(own->init);
  if (fd < 0) return fault_host(f, errno, "open a pidfd of PID 1 of %s", s->spec.id);
  while (waitpid(setup, NULL, 0) < 0 && errno == EINTR) {}
  while (waitpid(own->helper, NULL, 0) < 0 && errno == EINTR) {}
  close(s->init_fd);
  s->init_fd = fd;
  s->init = own->init;
  return 0;
}

// The process that becomes PID 1. It mounts while this one makes cgroups and network namespace, which takes about as long.
static int start_init(struct sandbox *s, struct fault *f) {
  int status[2], go[2], self = sys_pidfd_open(getpid());
  if (self < 0) return fault_host(f, errno, "open a pidfd");
  if (pipe2(status, O_CLOEXEC)) { close(self); return fault_host(f, errno, "make a pipe"); }
  if (pipe2(go, O_CLOEXEC)) { close(self); close(status[0]); close(status[1]); return fault_host(f, errno, "make a pipe"); }
  struct own_pids *own = mmap(NULL, sizeof *own, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  uint64_t spaces = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | (s->spec.own_pids ? 0 : CLONE_NEWPID);
  struct clone_args a = {.flags = spaces | CLONE_PIDFD | CLONE_INTO_CGROUP,
                         .pidfd = (uint64_t)(uintptr_t)&s->init_fd, .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)s->cgroup_fd};
  if (own == MAP_FAILED) own = NULL;
  pid_t pid = own ? sys_clone3(&a) : -1;
  if (!pid) {
    struct setup u = {.s = s, .own = own, .status = status[1], .go = go[0], .aether = self, .dev = -1};
    close(go[1]);                      // so that the death of aether is the end of that pipe
    setup_child(&u);
  }
  int err = errno;
  close(status[1]);
  close(go[0]);
  if (pid < 0) {
    s->init_fd = -1;
    fault_lack(f, err == EAGAIN ? "processes" : "namespaces", err, "make the namespaces of %s", s->spec.id);
  }
  s->init = pid;
  int heard = pid < 0 || cgroup_limit(s, f) || netns_make(f) ? -1 : 1;
  // a setup that failed meanwhile does not read this, but has said why
  if (heard > 0) heard = write(go[1], "", 1) < 0 && errno != EPIPE ? fault_host(f, errno, "let the setup go on") : hear(status[0], s, f);
  if (heard > 0 && ((s->spec.own_pids && take_over(s, own, f)) || inspect_root(s, f))) heard = -1;
  int done = heard > 0;                // the end of its messages comes from the exec only after these
  while (heard > 0) heard = hear(status[0], s, f);
  close(status[0]);
  close(go[1]);
  close(self);
  if (own) munmap(own, sizeof *own);
  // somebody killed it, or the host is out of memory
  struct pollfd dead = {.fd = s->init_fd, .events = POLLIN};
  if (!heard && (!done || poll(&dead, 1, 0) > 0)) heard = fault_set(f, "resource_exhausted", 0, "PID 1 of %s died while it was made", s->spec.id);
  return heard;
}

int sandbox_create(struct sandbox *s, const struct spec *spec, int userns, struct fault *f) {
  *s = (struct sandbox){.spec = *spec, .init_fd = -1, .listen_fd = -1, .userns_fd = userns, .cgroup_fd = -1, .oom_fd = -1,
                        .devpts_fd = -1, .box = &box};
  box = (struct box){.volume = -1, .root = -1, .null = -1};
  for (int i = 0; i < CG_COUNT; i++) box.v1[i] = box.join[i] = -1;
  if (!s->spec.userns) s->spec.uid_base = 0;
  s->spec.keep = s->spec.turn > 0;     // until it runs
  for (int i = 0; i < spec->nlayers && !spec->channel; i++)
    if (!layer_mounted(spec->layers[i])) return fault_set(f, "layer_not_found", 0, "layer %.100s is not mounted on this node", spec->layers[i]);
  // an id that is in use must not be undone
  char path[4200];
  snprintf(path, sizeof path, "%s/aether.sock", spec->run_dir);
  if (path_exists(path)) return fault_set(f, "internal", EEXIST, "the sandbox id %s is in use: %s", spec->id, path);
  if (listen_first(s, f) || cgroup_make(s, f)) goto undo;
  if (spec->channel ? medium_take(s, f) || machine_start(s, f) : (spec->medium == MEDIUM_BTRFS && medium_make(s, f)) || start_init(s, f)) goto undo;
  return 0;
undo:
  sandbox_kill(s);
  sandbox_remove(s);
  return -1;
}

static int overwrite(int etc, const char *name, const char *text, int n, struct fault *f);

// The one that it had is that of the machine it is a copy of.
static int new_machine_id(struct fault *f) {
  uint8_t random[16];
  char text[40];
  int etc = open_inside(box.root, "etc", O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (etc < 0) return 0;
  int bad = getrandom(random, sizeof random, 0) != sizeof random;
  for (size_t k = 0; k < sizeof random; k++) snprintf(text + 2 * k, 4, "%02x\n", random[k]);
  if (bad) fault_host(f, errno, "make a machine id");
  else bad = overwrite(etc, "machine-id", text, 33, f);
  close(etc);
  return bad ? -1 : 0;
}

int sandbox_adopt(struct sandbox *s, const struct spec *spec, int copied, struct fault *f) {
  struct spec now = s->spec;
  now.user = spec->user;
  now.workdir = spec->workdir;
  now.pids = spec->pids;
  now.cpu_milli = spec->cpu_milli;
  now.nofile = spec->nofile;
  s->spec = now;
  if (copied ? new_machine_id(f) : fits(s, f)) return -1; // what a running one did to its files is for its next command to say
  return cgroup_bound(s, f) || sandbox_rename(s, spec->hostname, f) ? -1 : 0;
}

static int overwrite(int etc, const char *name, const char *text, int n, struct fault *f) {
  struct stat st;
  int fd = openat(etc, name, O_WRONLY | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return 0;
  int bad = fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode) || write(fd, text, (size_t)n) != n;
  if (bad) fault_host(f, errno, "write /etc/%s", name);
  close_fd(&fd);
  return bad ? -1 : 0;
}

// Its two files are what setup_child wrote, if the layers have an /etc for them. `hostname` stays: the sandbox keeps the pointer.
int sandbox_rename(struct sandbox *s, const char *hostname, struct fault *f) {
  char text[512];
  if (hostname_check(hostname, f)) return -1;
  if (s->channel > 0) {
    if (machine_rename(hostname, f)) return -1;
    s->spec.hostname = hostname;
    return 0;
  }
  int own = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC);
  if (own < 0 || setns(s->init_fd, CLONE_NEWUTS)) {
    fault_host(f, errno, "enter the host name's namespace of %s", s->spec.id);
    close_fd(&own);
    return -1;
  }
  int bad = sethostname(hostname, strlen(hostname)) ? fault_host(f, errno, "set the host name") : 0;
  if (setns(own, CLONE_NEWUTS)) bad = fault_host(f, errno, "leave the host name's namespace of %s", s->spec.id);
  close(own);
  if (bad) return -1;
  const char *was = s->spec.hostname;
  s->spec.hostname = hostname;
  int etc = open_inside(box.root, "etc", O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (etc < 0) return 0;
  int n = snprintf(text, sizeof text, "%.64s\n", hostname);
  bad = overwrite(etc, "hostname", text, n, f) || overwrite(etc, "hosts", text, hosts_text(s, text, sizeof text), f) ? -1 : 0;
  close(etc);
  if (bad) s->spec.hostname = was;
  return bad;
}

void sandbox_kill(struct sandbox *s) {
  if (s->cgroup_fd >= 0) cgroup_kill(s->cgroup_fd);
  if (s->init_fd < 0) return;
  sys_pidfd_kill(s->init_fd, SIGKILL); // a half-made one may be outside the group
  // PID 1 does not end before everybody in its pid namespace was reaped; our children there that nobody waits for any more are reaped here
  struct pollfd p = {.fd = s->init_fd, .events = POLLIN};
  while (poll(&p, 1, 50) <= 0) {
    siginfo_t info;
    while (!waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) && info.si_pid && info.si_pid != s->init && waitpid(info.si_pid, NULL, 0) > 0)
      info.si_pid = 0;
  }
  while (waitpid(s->init, NULL, 0) < 0 && errno == EINTR) {}
  close_fd(&s->init_fd);
}

void sandbox_remove(struct sandbox *s) {
  struct fault ignored = {0};
  struct spec spec = s->spec;
  // what we hold open pins the layer and the groups
  close_fd(&box.root);
  close_fd(&box.null);
  close_fd(&box.volume);
  close_fd(&s->devpts_fd);
  close_fd(&s->userns_fd);
  close_fd(&s->oom_fd);
  close_fd(&s->cgroup_fd);
  for (int i = 0; i < CG_COUNT; i++) {
    close_fd(&box.join[i]);
    close_fd(&box.v1[i]);
  }
  close_fd(&s->listen_fd);
  if (s->channel > 0) close_fd(&s->channel);
  sandbox_sweep(&spec, &ignored);
}

void sandbox_rest(struct sandbox *s) {
  if (medium_rest(s)) fprintf(stderr, "aether %s: write its files back: %s\n", s->spec.id, strerror(errno));
  cgroup_reclaim(s);
}

void sandbox_usage(struct sandbox *s, struct usage *u) {
  int full;
  *u = (struct usage){0};
  if (s->channel > 0) { machine_usage(u); return; }
  cgroup_usage(s, u);
  medium_usage(s, &u->disk, &full);
}

int sandbox_disk_full(struct sandbox *s) {
  uint64_t used;
  int full;
  if (s->channel > 0) return machine_disk_full();
  medium_usage(s, &used, &full);
  return full;
}

static int same_file(const struct file_id *a, const struct file_id *b) {
  return a->dev == b->dev && a->ino == b->ino && a->size == b->size && a->ctime_ns == b->ctime_ns;
}

int sandbox_shell_replaced(struct sandbox *s) {
  struct file_id id;
  int executable;
  if (s->channel > 0) return machine_shell_replaced();
  if (identify("bin/sh", &id, &executable)) return 0;
  if (!same_file(&id, &s->shell) || executable != s->has_shell) return 1;
  if (identify("bin/bash", &id, &executable)) return 0;
  return !same_file(&id, &s->bash) || (id.ino && !executable);
}

int sandbox_pty(struct sandbox *s, int rows, int cols, int *slave, struct fault *f) {
  *f = (struct fault){0};
  if (s->channel > 0) return machine_terminal(rows, cols, slave, f);
  struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
  int unlock = 0, master = openat(s->devpts_fd, "ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
  *slave = -1;
  if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) || (*slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0 ||
      ioctl(master, TIOCSWINSZ, &size)) {
    fault_host(f, errno, "open a terminal in %s", s->spec.id);
    close_fd(slave);
    close_fd(&master);
  }
  return master;
}
