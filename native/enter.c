// The one way into a sandbox: a child of aether that joins its groups and namespaces, takes the user, gives up everything else, and
// becomes the program (or runs our own code). Nothing it needs on the way is resolved through the sandbox's PATH, shell or libraries.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define START_MS 15000                 // a start that takes longer is stuck: out of memory, or frozen
#define LOOK_MS 50                     // how often it is looked whether somebody inside stopped it
#define STOPS_MAX 10                   // so often it is continued
#define TTY_GROUP 5
#define FD_HIGH 64                     // descriptors on their way to a fixed number wait above this
#define ENV_TOTAL (2 * MAX_ENV + 8)
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static void give_fault(int status, const struct fault *f) {
  ssize_t n = write(status, f, sizeof *f);
  _exit(n == sizeof *f ? 126 : 127);
}

// ---- environment ----------------------------------------------------------------------------------------------------------------------

struct environment { const char *v[ENV_TOTAL]; int n; };

static size_t name_length(const char *entry) { return strcspn(entry, "="); }

static const char *env_get(const struct environment *e, const char *name) {
  size_t n = strlen(name);
  for (int i = 0; i < e->n; i++)
    if (!strncmp(e->v[i], name, n) && e->v[i][n] == '=') return e->v[i] + n + 1;
  return NULL;
}

// What is there already wins, so the strongest source comes first.
static void env_add(struct environment *e, const char *entry, int known) {
  size_t n = name_length(entry);
  if (!n || !entry[n] || e->n >= ENV_TOTAL - 1) return;
  for (int i = 0; i < known; i++)
    if (!strncmp(e->v[i], entry, n + 1)) return;
  e->v[e->n++] = entry;
  e->v[e->n] = NULL;
}

static void environment(struct environment *e, const struct sandbox *s, const struct entry *x, const struct account *a) {
  static char home[520], user[80], logname[80], host[300];
  e->n = 0;
  for (int i = 0; x->env && x->env[i]; i++) env_add(e, x->env[i], e->n);
  int strongest = e->n;
  for (int i = 0; i < s->spec.nenv; i++) env_add(e, s->spec.env[i], strongest);
  snprintf(home, sizeof home, "HOME=%s", a->home);
  snprintf(user, sizeof user, "USER=%s", a->name);
  snprintf(logname, sizeof logname, "LOGNAME=%s", a->name);
  snprintf(host, sizeof host, "HOSTNAME=%.255s", s->spec.hostname);
  env_add(e, "PATH=" DEFAULT_PATH, e->n);
  env_add(e, home, e->n);
  env_add(e, user, e->n);
  env_add(e, logname, e->n);
  env_add(e, host, e->n);
  if (x->tty) env_add(e, "TERM=xterm", e->n);
}

// ---- the program ----------------------------------------------------------------------------------------------------------------------

static int exec_fault(struct fault *f, const char *path, int err) {
  struct stat st;
  char head[160];
  int n = 0;
  if (err == ENOENT && !stat(path, &st)) {               // it is there, so what is missing is what runs it
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0) n = (int)read(fd, head, sizeof head - 1);
    head[n > 0 ? n : 0] = 0;
    if (n > 2 && head[0] == '#' && head[1] == '!') {
      char *name = head + 2 + strspn(head + 2, " \t");
      name[strcspn(name, " \t\r\n")] = 0;
      return fault_set(f, "binary_not_found", 0, "%.80s: its interpreter %.80s is not there", path, name);
    }
    return fault_set(f, "binary_not_found", 0, "%.120s: its dynamic loader is not there", path);
  }
  switch (err) {
    case ENOENT: case ENOTDIR: case ELOOP: case ENAMETOOLONG: return fault_set(f, "binary_not_found", err, "%.120s", path);
    case ENOMEM: return fault_set(f, "no_memory", err, "start %.120s", path);
    case E2BIG: return fault_set(f, "invalid_request", err, "start %.120s", path);
    case ENFILE: case EMFILE: return fault_set(f, "resource_exhausted", err, "start %.120s", path);
    default: return fault_set(f, "not_executable", err, "%.120s", path);
  }
}

static void program(const struct entry *x, const struct environment *e, struct fault *f) {
  const char *name = x->argv[0];
  char *const *argv = (char *const *)(uintptr_t)x->argv, *const *env = (char *const *)(uintptr_t)e->v;
  char path[4096];
  if (strchr(name, '/')) {
    execve(name, argv, env);
    exec_fault(f, name, errno);
    return;
  }
  int denied = 0;
  const char *p = env_get(e, "PATH");
  while (*name && p) {
    size_t n = strcspn(p, ":");
    int fits = snprintf(path, sizeof path, "%.*s%s%s", (int)n, p, n ? "/" : "", name) < (int)sizeof path;
    if (fits) {
      execve(path, argv, env);
      if (errno == ENOENT && path_exists(path)) { exec_fault(f, path, ENOENT); return; }
      if (errno == EACCES) denied = 1;
      else if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) { exec_fault(f, path, errno); return; }
    }
    p = p[n] ? p + n + 1 : NULL;
  }
  if (denied) fault_set(f, "not_executable", EACCES, "%.120s", name);
  else fault_set(f, "binary_not_found", 0, "%.120s is not in the PATH %.60s", name, env_get(e, "PATH") ? env_get(e, "PATH") : "");
}

// bash where there is one, else sh. A shell that was there at the start and now cannot run was broken from inside.
static void shell(const struct sandbox *s, const struct entry *x, const struct environment *e, struct fault *f) {
  char *const *env = (char *const *)(uintptr_t)e->v;
  char *text = (char *)(uintptr_t)x->shell_text;
  char *bash[] = {(char *)"bash", (char *)"-c", text, NULL}, *sh[] = {(char *)"sh", (char *)"-c", text, NULL};
  execve("/bin/bash", bash, env);
  if (errno == E2BIG || errno == ENOMEM) { exec_fault(f, "/bin/bash", errno); return; }
  execve("/bin/sh", sh, env);
  int err = errno;
  if (err == E2BIG || err == ENOMEM || err == EMFILE || err == ENFILE) exec_fault(f, "/bin/sh", err);
  else if (s->has_shell) fault_set(f, "sandbox_damaged", err, "the sandbox's shell /bin/sh was there when it was made and can no longer be run");
  else fault_set(f, "binary_not_found", err, "there is no shell in this sandbox: /bin/sh");
}

// ---- the child ------------------------------------------------------------------------------------------------------------------------

static int join(const struct sandbox *s, const struct entry *x, struct fault *f) {
  for (int i = 0; i < CG_COUNT; i++) {
    if (s->box->join[i] < 0 || (x->light && i != CG_MEMORY)) continue;
    if (write(s->box->join[i], "0", 1) != 1)
      return fault_set(f, errno == ENOMEM ? "no_memory" : "internal", errno, "join the cgroups of %s", s->spec.id);
  }
  // the pid namespace was chosen by the parent
  int spaces = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | (s->userns_fd >= 0 ? CLONE_NEWUSER : 0);
  if (setns(s->init_fd, spaces)) return fault_set(f, "internal", errno, "join the namespaces of %s", s->spec.id);
  return 0;
}

static int directory(const struct sandbox *s, const struct entry *x, struct fault *f) {
  const char *cwd = x->cwd && *x->cwd ? x->cwd : s->spec.workdir;
  int bad = (*cwd != '/' && chdir(s->spec.workdir)) || chdir(cwd);
  if (!bad) return 0;
  return fault_set(f, errno == EACCES ? "permission_denied" : errno == ENOMEM ? "no_memory" : "cwd_not_found", errno,
                   "the working directory %.120s", cwd);
}

// Moves the descriptors to their places; all others close at exec, or now when our own code runs.
static int descriptors(const struct sandbox *s, const struct entry *x, int *status, struct fault *f) {
  int from[4] = {x->in, x->out, x->err, x->ctl}, to[4] = {0, 1, 2, x->ctl_as}, n = x->ctl >= 0 ? 4 : 3;
  for (int i = 0; i < 3; i++)
    if (from[i] < 0) from[i] = s->box->null;
  if (*status < FD_HIGH && (*status = fcntl(*status, F_DUPFD_CLOEXEC, FD_HIGH)) < 0) return fault_set(f, "internal", errno, "move a descriptor");
  for (int i = 0; i < n; i++)          // none may be overwritten before it was moved
    if (from[i] < FD_HIGH && (from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, FD_HIGH)) < 0) return fault_set(f, "internal", errno, "move a descriptor");
  if (!x->run) {
    if (close_range(3, ~0u, CLOSE_RANGE_CLOEXEC)) return fault_set(f, "internal", errno, "close the descriptors");
    for (int i = 0; i < n; i++)
      if (dup2(from[i], to[i]) < 0) return fault_set(f, "internal", errno, "place descriptor %d", to[i]);
    return 0;
  }
  for (int i = 0; i < 3; i++)
    if (dup2(from[i], to[i]) < 0) return fault_set(f, "internal", errno, "place descriptor %d", to[i]);
  int low = *status < x->keep ? *status : x->keep, high = *status < x->keep ? x->keep : *status;
  if (low < 3) low = 2;                // nothing is kept but the status pipe
  if ((low > 3 && close_range(3, (unsigned)low - 1, 0)) || (high > low + 1 && close_range((unsigned)low + 1, (unsigned)high - 1, 0)) ||
      close_range((unsigned)high + 1, ~0u, 0))
    return fault_set(f, "internal", errno, "close the descriptors");
  return 0;
}

static int limits(const struct sandbox *s, struct fault *f) {
  struct rlimit none = {0, 0}, files;
  if (setrlimit(RLIMIT_CORE, &none) || getrlimit(RLIMIT_NOFILE, &files)) return fault_set(f, "internal", errno, "limit core files");
  if (s->spec.nofile && s->spec.nofile < files.rlim_max) files.rlim_max = s->spec.nofile;
  files.rlim_cur = files.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &files) ? fault_set(f, "internal", errno, "limit open files") : 0;
}

static void __attribute__((noreturn)) child(struct sandbox *s, const struct entry *x, int status, pid_t parent) {
  static struct account a;
  static struct environment e;
  struct fault f = {0};
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  const char *user = x->user && *x->user ? x->user : s->spec.user;
  if (account_find(s->box->root, user, s->userns_fd >= 0, &a, &f)) give_fault(status, &f);
  if (x->tty && fchown(x->in, s->spec.uid_base + a.uid, s->spec.uid_base + TTY_GROUP)) {
    fault_set(&f, "internal", errno, "hand the terminal to %s", a.name);
    give_fault(status, &f);
  }
  if (join(s, x, &f)) give_fault(status, &f);
  setsid();
  if (x->tty && ioctl(x->in, TIOCSCTTY, 0)) {
    fault_set(&f, "internal", errno, "take the terminal");
    give_fault(status, &f);
  }
  if (privilege_cut(&a, 0, &f) || directory(s, x, &f)) give_fault(status, &f);
  umask(022);
  if (descriptors(s, x, &status, &f) || limits(s, &f)) give_fault(status, &f); // in this order: aether holds more files than a sandbox may
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // until exec nobody inside may look into this process
  if (x->run) {
    // our own code dies with aether; nothing else would end it
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || getppid() != parent) _exit(127);
    if (filter_load(&node.filter)) {
      fault_set(&f, "internal", errno, "load the system call filter");
      give_fault(status, &f);
    }
    close(status);
    x->run(x->arg);
    _exit(0);
  }
  environment(&e, s, x, &a);
  if (filter_load(&node.filter)) fault_set(&f, "internal", errno, "load the system call filter");
  else if (x->shell_text) shell(s, x, &e, &f);
  else program(x, &e, &f);
  give_fault(status, &f);
  __builtin_unreachable();
}

// ---- the parent -----------------------------------------------------------------------------------------------------------------------

// Children are born in the sandbox's pid namespace, or, when our own code runs, in the host's, where nobody inside can see them.
static int birthplace(struct sandbox *s, int inside, struct fault *f) {
  if (s->box->pid_ns_inside == inside) return 0;
  if (setns(inside ? s->init_fd : s->hostpid_fd, CLONE_NEWPID)) return fault_set(f, "internal", errno, "choose a pid namespace");
  s->box->pid_ns_inside = inside;
  return 0;
}

// The last steps before exec are taken as a user of the sandbox, who can stop the child there, and aether waits here.
static int continued(pid_t pid, int *stops) {
  siginfo_t info = {0};
  if (waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOHANG) || !info.si_pid) return 0;
  return ++*stops > STOPS_MAX || kill(pid, SIGCONT) ? -1 : 0;
}

static int started(int pipe, pid_t pid, struct fault *f) {
  struct fault said;
  struct pollfd p = {.fd = pipe, .events = POLLIN};
  int ready, stops = 0, left = START_MS;
  while ((ready = poll(&p, 1, LOOK_MS)) <= 0 && (left -= LOOK_MS) > 0)
    if (!ready && continued(pid, &stops)) return fault_set(f, "sandbox_damaged", 0, "a process of the sandbox stops each program before it starts");
  ssize_t n = ready > 0 ? read(pipe, &said, sizeof said) : -1;
  if (!n) return 0;
  if (n != sizeof said) return fault_set(f, "internal", 0, "the program did not start within %d s", START_MS / 1000);
  *f = said;
  return -1;
}

pid_t sandbox_enter(struct sandbox *s, const struct entry *x, int *pidfd, struct fault *f) {
  int status[2], child_fd = -1;
  *f = (struct fault){0};
  *pidfd = -1;
  if (!x->run && !x->shell_text && (!x->argv || !x->argv[0])) return fault_set(f, "invalid_request", 0, "there is no program to run");
  if (!x->light && cgroup_pids_full(s)) return fault_set(f, "pids_limit", 0, "the sandbox is at its limit of %u processes", s->spec.pids);
  if (birthplace(s, !x->run, f)) return -1;
  if (pipe2(status, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  struct clone_args a = {.flags = CLONE_PIDFD | CLONE_INTO_CGROUP | CLONE_CLEAR_SIGHAND, .pidfd = (uint64_t)(uintptr_t)&child_fd,
                         .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)(x->cgroup_fd >= 0 ? x->cgroup_fd : s->cgroup_fd)};
  if (!x->run) prctl(PR_SET_NAME, "exec", 0, 0, 0);      // what /proc inside shows until exec
  pid_t parent = getpid(), pid = sys_clone3(&a);
  if (!pid) child(s, x, status[1], parent);
  int err = errno;
  if (!x->run) prctl(PR_SET_NAME, "aether", 0, 0, 0);
  close(status[1]);
  if (pid < 0) {
    close(status[0]);
    if (err == EAGAIN && cgroup_pids_full(s)) return fault_set(f, "pids_limit", err, "the sandbox is at its limit of %u processes", s->spec.pids);
    return fault_host(f, err, "start a process in %s", s->spec.id);
  }
  int bad = started(status[0], pid, f);
  close(status[0]);
  if (!bad) {
    *pidfd = child_fd;
    return pid;
  }
  sys_pidfd_kill(child_fd, SIGKILL);
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
  close(child_fd);
  return -1;
}
