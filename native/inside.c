// What can be seen of the processes inside from here: whether they can be copied with their memory, and whether they have no more rights than a
// command has.
//
// What cannot go on in another sandbox is refused by name: nothing is left out in silence.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

// ---- looking ------------------------------------------------------------------------------------------------------------------------------

// The number behind a key, such as "\nUid:\t"; UINT64_MAX: there is none.
static uint64_t value(const char *text, const char *key, int base) {
  const char *at = strstr(text, key);
  return at ? strtoull(at + strlen(key), NULL, base) : UINT64_MAX;
}

static int status_of(int32_t pid, int32_t thread, char *text, size_t cap) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/task/%d/status", pid, thread);
  return read_at(AT_FDCWD, path, text, cap) < 0 ? -1 : 0;
}

int process_look(int32_t pid, struct seen *p) {
  char text[4096];
  *p = (struct seen){.pid = pid};
  if (status_of(pid, pid, text, sizeof text)) return -1;
  char *parent = strstr(text, "\nPPid:\t"), *spaces = strstr(text, "\nNSpid:"), *end = spaces ? strchr(spaces + 1, '\n') : NULL;
  if (!parent || !end) return -1;
  sscanf(text, "Name:\t%16[^\n]", p->name);
  for (char *c = p->name; *c; c++)
    if (*c < ' ' || *c > '~') *c = '?';
  p->parent = atoi(parent + 7);
  *end = 0;
  for (char *c = spaces + 7; *c == '\t'; c += strcspn(c, "\t")) {
    p->inner = atoi(++c);
    p->depth++;
  }
  return 0;
}

// Calls fn for every thread, with its status; stops when it returns other than 0, and returns that.
static int each_thread(int32_t pid, int (*fn)(const char *status, void *arg), void *arg) {
  char path[48], text[4096];
  int end = 0;
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR *d = opendir(path);
  if (!d) return 0;                    // it has ended
  for (struct dirent *e; !end && (e = readdir(d));)
    if (e->d_name[0] != '.' && !status_of(pid, atoi(e->d_name), text, sizeof text)) end = fn(text, arg);
  closedir(d);
  return end;
}

// ---- can they be copied -------------------------------------------------------------------------------------------------------------------

int refuse_copy(struct fault *f, const char *who, const char *why) {
  return fault_set(f, "checkpoint_failed", 0, "%s cannot be copied with its memory: %s", who, why);
}

int command_runs(const struct command *cmd) { return cmd->state == C_RUNNING || cmd->state == C_QUEUED; }

static int check_commands(struct fault *f) {
  char who[64];
  for (const struct command *cmd = A.live; cmd; cmd = cmd->next) {
    if (!command_runs(cmd)) continue;
    snprintf(who, sizeof who, "command %s", cmd->rec.command);
    if (cmd->session) return refuse_copy(f, who, "it runs in a named session");
    if (cmd->pty) return refuse_copy(f, who, "it has a terminal");
    if (exec_starting(cmd)) return fault_set(f, "unavailable", 0, "%s is being started", who);
  }
  return 0;
}

static int below(const struct seen *p, pid_t root) {
  struct seen up = *p;
  for (int i = 0; i < 256; i++) {
    if (up.pid == root) return 1;
    if (up.parent <= 1 || up.parent == A.s->init || process_look(up.parent, &up)) return 0;
  }
  return 0;
}

struct threads { struct fault *f; const char *who; int32_t highest; };

static int check_thread(const char *status, void *arg) {
  struct threads *t = arg;
  const char *state = strstr(status, "\nState:\t"), *spaces = strstr(status, "\nNSpid:");
  // frozen, and in a call all the same: it waits for a child that has its memory until it runs a program
  if (state && state[8] == 'D') return fault_set(t->f, "unavailable", 0, "%s is in the middle of starting another program", t->who);
  uint64_t tracer = value(status, "\nTracerPid:\t", 10), filters = value(status, "\nSeccomp_filters:\t", 10);
  if (tracer && tracer != UINT64_MAX) return refuse_copy(t->f, t->who, "another process traces it");
  // criu's code in it is bound by them
  if (filters != UINT64_MAX && filters > 1) return refuse_copy(t->f, t->who, "it has system call filters of its own");
  for (const char *c = spaces ? spaces + 7 : ""; *c == '\t'; c += strcspn(c, "\t\n")) {
    int32_t inner = atoi(++c);
    if (strcspn(c, "\t") > strcspn(c, "\n") && inner > t->highest) t->highest = inner;     // the last on the line
  }
  return 0;
}

static int is_idle_shell(int32_t pid) {
  int32_t shell;
  for (size_t i = 0; (shell = session_idle(i)); i++)
    if (shell == pid) return 1;
  return 0;
}

// Every process inside is PID 1, an idle session's shell, or of the tree of a running command.
static int check_processes(int32_t *highest, struct fault *f) {
  static int32_t all[MOST_PIDS];
  char who[64];
  size_t n = group_pids("", all, MOST_PIDS);
  if (n == MOST_PIDS) return refuse_copy(f, "this sandbox", "it has too many processes");
  for (size_t i = 0; i < n; i++) {
    struct seen p;
    // our own helpers are not in its pid namespace
    if (all[i] == A.s->init || is_idle_shell(all[i]) || process_look(all[i], &p) || p.depth < 2) continue;
    snprintf(who, sizeof who, "process %d (%s)", p.inner, p.name);
    if (p.depth > 2) return refuse_copy(f, who, "it has a pid namespace of its own");
    int found = 0;
    for (const struct command *cmd = A.live; cmd && !found; cmd = cmd->next) found = command_runs(cmd) && below(&p, cmd->pid);
    if (!found) return refuse_copy(f, who, "it belongs to no running command, as it left the one that started it");
    struct threads t = {f, who, *highest};
    if (each_thread(p.pid, check_thread, &t)) return -1;
    *highest = t.highest;
  }
  return 0;
}

// On an overlay criu takes the name of a unix socket for one that was removed, and nobody could connect any more.
static int check_sockets(struct fault *f) {
  char line[512], path[160], who[200];
  FILE *all = fopen("/proc/self/net/unix", "re");        // we are in its network namespace
  if (!all) return fault_host(f, errno, "list the sockets of the sandbox");
  while (!f->code && fgets(line, sizeof line, all)) {
    if (sscanf(line, "%*s %*s %*s %*s %*s %*s %*s %159[^\n]", path) != 1 || *path == '@' || !strncmp(line, "Num", 3)) continue;
    for (char *c = path; *c; c++)
      if (*c < ' ' || *c > '~') *c = '?';
    snprintf(who, sizeof who, "the socket %s", path);
    refuse_copy(f, who, "its name is a file");
  }
  fclose(all);
  return f->code ? -1 : 0;
}

// System V and POSIX objects belong to the sandbox and not to a process: criu, which copies commands, does not see them.
static int check_ipc(struct fault *f) {
  static const struct { const char *path, *what; } kinds[] = {
    {"/proc/sysvipc/shm", "a System V shared memory segment"}, {"/proc/sysvipc/sem", "a System V semaphore set"},
    {"/proc/sysvipc/msg", "a System V message queue"}};
  static const char *const no_options[] = {NULL};
  char text[1024];
  if (setns(A.s->init_fd, CLONE_NEWIPC)) return fault_host(f, errno, "join the IPC namespace of the sandbox");
  for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    if (read_at(AT_FDCWD, kinds[i].path, text, sizeof text) < 0) continue;                // a kernel without them
    char *first = strchr(text, '\n');
    if (first && first[1]) return refuse_copy(f, "this sandbox", kinds[i].what);
  }
  int queues = fs_mount("mqueue", no_options, 0), list = queues < 0 ? -1 : openat(queues, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = list < 0 ? NULL : fdopendir(list);
  if (!d) close_fd(&list);
  for (struct dirent *e; d && !f->code && (e = readdir(d));)
    if (e->d_name[0] != '.') refuse_copy(f, "this sandbox", "a POSIX message queue");
  if (d) closedir(d);
  close_fd(&queues);
  return f->code ? -1 : 0;
}

int inside_copyable(int32_t *highest, struct fault *f) {
  *highest = 0;
  return check_commands(f) || check_processes(highest, f) || check_sockets(f) || check_ipc(f) ? -1 : 0;
}

// ---- have they no more rights than a command ------------------------------------------------------------------------------------------------

static int same_namespaces(int32_t pid) {
  static const char *const names[] = {"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
    char path[48];
    struct stat own, init;
    snprintf(path, sizeof path, "/proc/%d/ns/%s", A.s->init, names[i]);
    if (stat(path, &init)) return 0;
    snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, names[i]);
    if (stat(path, &own)) return errno == ENOENT || errno == ESRCH;      // it is about to end, and has none any more
    if (own.st_ino != init.st_ino || own.st_dev != init.st_dev) return 0;
  }
  return 1;
}

static int exceeds(const char *status, void *arg) {
  static const char *const sets[] = {"\nCapInh:\t", "\nCapPrm:\t", "\nCapEff:\t", "\nCapBnd:\t", "\nCapAmb:\t"};
  (void)arg;
  for (unsigned i = 0; i < sizeof sets / sizeof *sets; i++)
    if (value(status, sets[i], 16) & ~privilege_most()) return 1;
  uint64_t uid = value(status, "\nUid:\t", 10), gid = value(status, "\nGid:\t", 10), base = A.s->spec.uid_base;
  return uid - base >= 65536 || gid - base >= 65536 || value(status, "\nNoNewPrivs:\t", 10) != 1 || value(status, "\nSeccomp:\t", 10) != 2;
}

int process_confined(int32_t pid) { return same_namespaces(pid) && !each_thread(pid, exceeds, NULL); }

int inside_confined(void) {
  static int32_t all[MOST_PIDS];
  struct seen p;
  size_t n = group_pids("", all, MOST_PIDS);
  for (size_t i = 0; i < n; i++)
    if (!process_look(all[i], &p) && p.depth >= 2 && !process_confined(all[i])) return 0;
  return 1;
}
