// The one way into a sandbox: a child of aether that joins its groups and namespaces, takes the user, gives up everything else, and
// makes the program's process (or runs our own code). Nothing it needs on the way is resolved through the sandbox's PATH, shell or
// libraries, and nothing of the platform is left when a process appears inside.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include "machine.h"
#include "node.h"
#include "start.h"
#include "util.h"

#define TTY_GROUP 5
#define FD_HIGH 64                     // descriptors on their way to a fixed number wait above this
#define STACK 65536                    // of a program's process until exec
#define ENV_TOTAL (2 * MAX_ENV + 8)
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static void __attribute__((noreturn)) give_fault(int status, const struct fault *f) {
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
    // the program joins the pids group itself: this process would count there, too
    int light = x->light && i != CG_MEMORY && (i != CG_CPU || s->spec.cpu_class != CPU_BEST_EFFORT); // moving files yields, too
    if (s->box->join[i] < 0 || light || (!x->run && i == CG_PIDS)) continue;
    if (write(s->box->join[i], "0", 1) != 1)
      return fault_set(f, errno == ENOMEM ? "no_memory" : "internal", errno, "join the cgroups of %s", s->spec.id);
  }
  if (s->box->clock && write(s->box->clock, "0", 1) != 1) return fault_set(f, "internal", errno, "join the clock of %s", s->spec.id);
  if (class_take(&s->spec, f)) return -1;
  // the pid namespace is where its children are born
  int spaces = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | (x->run ? 0 : CLONE_NEWPID) | (s->own_net ? CLONE_NEWNET : 0) |
               (s->userns_fd >= 0 ? CLONE_NEWUSER : 0);
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

static int lift(int *fd, struct fault *f) {
  if (*fd < 0 || *fd >= FD_HIGH || (*fd = fcntl(*fd, F_DUPFD_CLOEXEC, FD_HIGH)) >= 0) return 0;
  return fault_set(f, "internal", errno, "move a descriptor");
}

// Closes everything from `from` on but `kept`, in ascending order.
static int close_others(unsigned from, const int *kept, int n) {
  for (int i = 0; i <= n; i++) {
    unsigned to = i < n ? (unsigned)kept[i] : ~0u;
    if (to > from && close_range(from, i < n ? to - 1 : to, 0)) return -1;
    from = to + 1;
  }
  return 0;
}

// Moves the descriptors to their places and closes all others: a program's process must not have any of aether's, not even until exec,
// for a path that an agent planted may lead through its own /proc/self/fd. status and pids are closed by the exec.
static int descriptors(const struct sandbox *s, const struct entry *x, int *status, int *pids, struct fault *f) {
  int from[4] = {x->in, x->out, x->err, x->ctl}, to[4] = {0, 1, 2, x->ctl_as}, n = x->ctl >= 0 ? 4 : 3, kept[4], k = 0;
  if (lift(status, f) || lift(pids, f)) return -1;
  for (int i = 0; i < n; i++) {        // none may be overwritten before it was moved
    if (from[i] < 0) from[i] = s->box->null;
    if (lift(&from[i], f)) return -1;
  }
  for (int i = 0; i < n; i++)
    if (dup2(from[i], to[i]) < 0) return fault_set(f, "internal", errno, "place descriptor %d", to[i]);
  if (n == 4) kept[k++] = x->ctl_as;
  const int others[] = {*status, *pids, x->run ? x->keep : -1};
  for (unsigned i = 0; i < sizeof others / sizeof *others; i++) {
    if (others[i] < 3) continue;
    int at = k++;
    for (; at && kept[at - 1] > others[i]; at--) kept[at] = kept[at - 1];
    kept[at] = others[i];
  }
  return close_others(3, kept, k) ? fault_set(f, "internal", errno, "close the descriptors") : 0;
}

static int bound(int which, uint64_t to) {
  struct rlimit now, l = {to, to};
  return to && !getrlimit(which, &now) && to <= now.rlim_max ? setrlimit(which, &l) : 0;
}

static int bounds(const struct bounds *b, struct fault *f) {
  cpu_set_t one;
  CPU_ZERO(&one);
  if (b->cpu >= 0) CPU_SET((unsigned)b->cpu, &one);
  if (bound(RLIMIT_FSIZE, b->file_bytes) || bound(RLIMIT_CPU, b->cpu_s) || bound(RLIMIT_STACK, b->stack ? RLIM_INFINITY : 0) ||
      (b->cpu >= 0 && sched_setaffinity(0, sizeof one, &one)))
    return fault_set(f, "internal", errno, "limit the program");
  return 0;
}

static int limits(const struct sandbox *s, const struct entry *x, struct fault *f) {
  struct rlimit none = {0, 0}, files;
  if (setrlimit(RLIMIT_CORE, &none) || getrlimit(RLIMIT_NOFILE, &files)) return fault_set(f, "internal", errno, "limit core files");
  if (x->bounds && bounds(x->bounds, f)) return -1;
  if (s->spec.nofile && s->spec.nofile < files.rlim_max) files.rlim_max = s->spec.nofile;
  files.rlim_cur = files.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &files) ? fault_set(f, "internal", errno, "limit open files") : 0;
}

// Our own code: it dies with aether; nothing else would end it.
static void __attribute__((noreturn)) own(const struct entry *x, int status, pid_t parent) {
  struct fault f = {0};
  start_forget();
  if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || getppid() != parent) _exit(127);
  if (filter_load(&node.filter)) {
    fault_set(&f, "internal", errno, "load the system call filter");
    give_fault(status, &f);
  }
  close(status);
  x->run(x->arg);
  _exit(0);
}

struct program { const struct sandbox *s; const struct entry *x; const struct environment *e; int status, pids; };

// The program's process. Until exec it shares the memory of the first one, which waits for that; nobody inside may look into it.
static int second(void *arg) {
  const struct program *p = arg;
  const struct entry *x = p->x;
  struct fault f = {0};
  if (p->pids >= 0 && write(p->pids, "0", 1) != 1) fault_set(&f, "internal", errno, "join the pids cgroup of %s", p->s->spec.id);
  else if (setsid() < 0 || (x->tty && ioctl(0, TIOCSCTTY, 0))) fault_set(&f, "internal", errno, "take the terminal");
  else if (filter_load(x->zygote ? &node.zygote : &node.filter)) fault_set(&f, "internal", errno, "load the system call filter");
  else if (x->shell_text) shell(p->s, x, p->e, &f);
  else program(x, p->e, &f);
  give_fault(p->status, &f);
}

static void __attribute__((noreturn)) first(struct sandbox *s, const struct entry *x, pid_t *pid, int status, pid_t parent) {
  static struct account a;
  static struct environment e;
  static char stack[STACK] __attribute__((aligned(16)));
  struct fault f = {0};
  int pids = x->run ? -1 : s->box->join[CG_PIDS];
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  memset(node.title, 0, node.title_size);                // what /proc inside would show of us until exec
  memcpy(node.title, "exec", 5);
  prctl(PR_SET_MM, PR_SET_MM_ARG_END, node.title + 5, 0, 0);
  prctl(PR_SET_NAME, "exec", 0, 0, 0);
  const char *user = x->user && *x->user ? x->user : s->spec.user;
  if (account_find(s->box->root, user, s->userns_fd >= 0, &a, &f)) give_fault(status, &f);
  if (x->tty && fchown(x->in, s->spec.uid_base + a.uid, s->spec.uid_base + TTY_GROUP)) {
    fault_set(&f, "internal", errno, "hand the terminal to %s", a.name);
    give_fault(status, &f);
  }
  if (join(s, x, &f) || privilege_cut(&a, x->zygote ? KEEP_ZYGOTE : KEEP_USUAL, &f) || directory(s, x, &f)) give_fault(status, &f);
  umask(022);
  if (descriptors(s, x, &status, &pids, &f) || limits(s, x, &f)) give_fault(status, &f); // in this order: aether holds more files than a sandbox may
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  if (x->run) own(x, status, parent);
  environment(&e, s, x, &a);
  struct program p = {s, x, &e, status, pids};
  if (clone(second, stack + STACK, CLONE_PARENT | CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID, &p, pid) < 0) {
    int err = errno;
    if (err == EAGAIN) fault_set(&f, "pids_limit", err, "the sandbox is at its limit of %u processes", s->spec.pids);
    else fault_host(&f, err, "start a process in %s", s->spec.id);
    give_fault(status, &f);
  }
  close(status);                       // which tells aether, before this memory is given back
  _exit(0);
}

int sandbox_enter(struct sandbox *s, const struct entry *x, struct start *st, struct fault *f) {
  int status;
  *f = (struct fault){0};
  if (s->channel > 0) return machine_enter(s, x, st, f);
  starts_reap();
  if (!x->run && !x->shell_text && (!x->argv || !x->argv[0])) return fault_set(f, "invalid_request", 0, "there is no program to run");
  if (!x->light && cgroup_pids_full(s, starts_under_way()))
    return fault_set(f, "pids_limit", 0, "the sandbox is at its limit of %u processes", s->spec.pids);
  if (start_open(st, &status, f)) return -1;
  struct clone_args a = {.flags = CLONE_PIDFD | CLONE_INTO_CGROUP | CLONE_CLEAR_SIGHAND, .pidfd = (uint64_t)(uintptr_t)&st->pidfd,
                         .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)(x->cgroup_fd >= 0 ? x->cgroup_fd : s->cgroup_fd)};
  pid_t parent = getpid();
  st->pid = sys_clone3(&a);
  if (!st->pid) first(s, x, start_second(st), status, parent);
  int err = errno;
  close(status);
  if (st->pid > 0) return 0;
  start_cancel(st);
  if (err == EAGAIN && cgroup_pids_full(s, 0)) return fault_set(f, "pids_limit", err, "the sandbox is at its limit of %u processes", s->spec.pids);
  return fault_host(f, err, "start a process in %s", s->spec.id);
}
