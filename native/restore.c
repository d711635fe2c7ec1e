// RESTORE: commands of another sandbox go on in this one, which is new. One criu after the other, each a child of ours in the group of its
// command; the tasks that it makes stay when it ends, and the first of them is our child like any command's.
//
// What criu made is believed when we have looked at it: a process with more rights than a command has, without the filter of system calls, or in
// another namespace is the end of the sandbox.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define RESTORE_NS (60000 * MS)
#define MOST_PIDS 4096

static struct {
  struct source src;                   // pidfd of criu
  struct conn *conn;
  uint32_t request;
  char dir[PATH_MAX - 64];
  DIR *left;                           // commands still to come
  struct command *cmd;
  struct memory m;
  pid_t criu;
  int log;
  uint64_t give_up;
  int begun;                           // so many of them
} R = {.src.fd = -1, .log = -1};

static void next(void);

static void done(const struct fault *f) {
  if (R.left) closedir(R.left);
  R.left = NULL;
  close_fd(&R.log);
  R.give_up = 0;
  A.helpers--;
  touch();
  idle_again();
  if (R.conn && f->code) conn_error(R.conn, R.request, f->code, f->err, "%s", f->message);
  else if (R.conn) conn_ok(R.conn, R.request);
  R.conn = NULL;
}

static void failed(const struct fault *f) {
  char name[ID_SIZE + 4];
  if (R.cmd) {
    if (command_group(R.cmd, name)) group_kill(name);
    command_discard(R.cmd);
  }
  R.cmd = NULL;
  done(f);
}

// A pipe of the command: the end that stays here, and the one for criu, which opens it again as root of the sandbox.
static int one_pipe(int which, int *here, int *there, struct fault *f) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  *here = fds[which ? 0 : 1];
  *there = fds[which ? 1 : 0];
  if (fchown(*there, A.s->spec.uid_base, A.s->spec.uid_base) || set_blocking(*here, 0)) return fault_host(f, errno, "prepare a pipe");
  return 0;
}

static int fill(int dir, int to, struct fault *f) {
  int file = openat(dir, INPUT_FILE, O_RDONLY | O_CLOEXEC), bad = 0;
  if (file < 0) return 0;
  fcntl(to, F_SETPIPE_SZ, 1 << 20);
  for (ssize_t n; !bad && (n = splice(file, NULL, to, NULL, 1 << 20, SPLICE_F_NONBLOCK)) != 0;)
    if (n < 0) bad = fault_host(f, errno, "give the input of a command again");
  close(file);
  return bad;
}

static int read_memory(int dir, struct fault *f) {
  int fd = openat(dir, MEMORY_FILE, O_RDONLY | O_CLOEXEC);
  int good = fd >= 0 && read(fd, &R.m, sizeof R.m) == sizeof R.m && R.m.magic == MEMORY_MAGIC;
  close_fd(&fd);
  R.m.rec.command[ID_SIZE - 1] = 0;
  return good && id_valid(R.m.rec.command) ? 0 : fault_set(f, "internal", 0, "the images in %s are not complete", R.dir);
}

static struct command *make_command(struct fault *f) {
  const struct memory *m = &R.m;
  struct command *cmd = command_new(m->rec.command, m->definition);
  if (!cmd) { fault_set(f, "resource_exhausted", ENOMEM, "no memory for command %s", m->rec.command); return NULL; }
  cmd->rec.head = m->rec.head;
  cmd->rec.tail = m->rec.tail;
  for (int i = 0; i < 2; i++) log_init(&cmd->log[i], m->rec.command, i, m->rec.head, m->rec.tail);
  cmd->shell = m->shell;
  cmd->stop = m->stop;
  command_begin(cmd);
  cmd->timeout_ns = m->timeout_ns;
  cmd->rec.start_ns = m->rec.start_ns;
  return cmd;
}

static int begin(const char *name, struct fault *f) {
  char path[PATH_MAX], group[ID_SIZE + 4], inherit[CRIU_PIPES][48];
  const char *args[12] = {"restore", "--restore-detached", "--restore-sibling", "--file-locks"};
  struct criu c = {.args = args, .images = path, .restore = 1};
  int n = 4, bad = -1, here[3] = {-1, -1, -1}, pidfd = -1;
  snprintf(path, sizeof path, "%s/%s", R.dir, name);
  int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0 || read_memory(dir, f) || !(R.cmd = make_command(f))) { close_fd(&dir); return -1; }
  command_group(R.cmd, group);
  if ((c.group = group_make(group, f)) < 0) { close(dir); return -1; }
  R.cmd->group = 1;
  for (int i = 0; i < CRIU_PIPES; i++) {
    if (!R.m.pipe[i]) continue;
    int at = c.npipes;
    c.pipes[at] = -1;
    if (one_pipe(i, &here[i], &c.pipes[at], f)) goto out;
    c.npipes++;
    snprintf(inherit[i], sizeof inherit[i], "fd[%d]:pipe:[%llu]", CRIU_PIPE + at, (unsigned long long)R.m.pipe[i]);
    args[n++] = "--inherit-fd";
    args[n++] = inherit[i];
    if (!i) {
      R.cmd->in_pipe = pipe_inode(here[0]);
      if (fill(dir, here[0], f)) goto out;
      if (R.m.input) { stdin_open(R.cmd, here[0]); here[0] = -1; }
      continue;
    }
    if (!(R.cmd->chan[i - 1] = channel_new(here[i], i - 1, 0))) { fault_set(f, "resource_exhausted", ENOMEM, "no memory for command %s", name); goto out; }
    R.cmd->chan[i - 1]->cmd = R.cmd;
    here[i] = -1;
  }
  close_fd(&R.log);
  if ((R.log = c.log = memfd_create("log", MFD_CLOEXEC)) < 0) { fault_host(f, errno, "make a log"); goto out; }
  if (!R.begun++) c.last_pid = R.m.last_pid;             // what runs already has gone on from there
  if ((R.criu = criu_start(A.s, &c, &pidfd, f)) < 0) goto out;
  R.src.fd = pidfd;
  loop_want(&R.src, EPOLLIN);
  bad = 0;
out:
  for (int i = 0; i < c.npipes; i++) close_fd(&c.pipes[i]);
  for (int i = 0; i < CRIU_PIPES; i++) close_fd(&here[i]);
  close(c.group);
  close(dir);
  return bad;
}

// ---- looking at what it made ------------------------------------------------------------------------------------------------------------

static uint64_t value(const char *text, const char *key, int base) {
  const char *at = strstr(text, key);
  return at ? strtoull(at + strlen(key), NULL, base) : UINT64_MAX;
}

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

// One thread of a process. 0: it has no more rights than a command.
static int confined(int32_t pid, int32_t tid) {
  char path[64], text[4096];
  snprintf(path, sizeof path, "/proc/%d/task/%d/status", pid, tid);
  if (read_at(AT_FDCWD, path, text, sizeof text) < 0) return 1;          // it has ended
  uint64_t most = privilege_most();
  static const char *const sets[] = {"\nCapInh:\t", "\nCapPrm:\t", "\nCapEff:\t", "\nCapBnd:\t", "\nCapAmb:\t"};
  for (unsigned i = 0; i < sizeof sets / sizeof *sets; i++)
    if (value(text, sets[i], 16) & ~most) return 0;
  uint64_t uid = value(text, "\nUid:\t", 10), gid = value(text, "\nGid:\t", 10), base = A.s->spec.uid_base;
  return uid - base < 65536 && gid - base < 65536 && value(text, "\nNoNewPrivs:\t", 10) == 1 && value(text, "\nSeccomp:\t", 10) == 2;
}

static int inspect(int32_t pid) {
  char path[48];
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR *d = opendir(path);
  if (!d) return 1;                    // it has ended
  int good = same_namespaces(pid);
  for (struct dirent *e; good && (e = readdir(d));)
    if (e->d_name[0] != '.') {
      good = confined(pid, atoi(e->d_name));
      if (R.m.cpu_class != A.s->spec.cpu_class) class_give(&A.s->spec, atoi(e->d_name));
    }
  closedir(d);
  return good;
}

static int adopt(struct fault *f) {
  static int32_t pids[MOST_PIDS];
  struct command *cmd = R.cmd;
  char group[ID_SIZE + 4], path[48], text[4096];
  command_group(cmd, group);
  size_t n = group_pids(group, pids, MOST_PIDS);
  for (size_t i = 0; i < n; i++) {
    if (!inspect(pids[i])) return fault_set(f, "internal", 0, "command %s was restored with rights that it had not", cmd->rec.command);
    snprintf(path, sizeof path, "/proc/%d/status", pids[i]);
    if (read_at(AT_FDCWD, path, text, sizeof text) < 0) continue;
    if (value(text, "\nPPid:\t", 10) == (uint64_t)getpid()) cmd->pid = pids[i];
  }
  int pidfd = cmd->pid > 0 ? sys_pidfd_open(cmd->pid) : -1;
  if (pidfd < 0) return fault_set(f, "checkpoint_failed", 0, "command %s was restored, and died at once", cmd->rec.command);
  if (R.m.left_ns != NEVER) {
    cmd->deadline = A.now + R.m.left_ns;
    timer_want(cmd->deadline);
  }
  command_watch(cmd, pidfd);
  channels_resume(cmd);
  return 0;
}

static void on_criu(struct source *src, uint32_t events) {
  (void)events;
  struct fault f = {0};
  char why[120];
  int status = -1;
  loop_close(src);
  while (waitpid(R.criu, &status, 0) < 0 && errno == EINTR) {}
  if (status) {
    criu_reason(R.log, why, sizeof why);
    fault_set(&f, "checkpoint_failed", 0, "command %s could not be restored: %s", R.cmd->rec.command, why);
  } else if (!adopt(&f)) {
    R.cmd = NULL;
    next();
    return;
  }
  failed(&f);
}

static void next(void) {
  struct fault f = {0};
  struct dirent *e;
  do e = readdir(R.left);
  while (e && e->d_name[0] == '.');
  if (!e) done(&f);
  else if (begin(e->d_name, &f)) failed(&f);
}

void restore_start(struct conn *c, struct request *r) {
  if (node.criu < 0 || !A.s->spec.own_pids) { conn_error(c, r->id, "unsupported", 0, "RESTORE: this sandbox was not made for it"); return; }
  if (!r->path || *r->path != '/' || strlen(r->path) >= sizeof R.dir || R.left || A.running) {
    conn_error(c, r->id, "invalid_request", 0, "RESTORE: a directory is needed, and a sandbox in which nothing runs");
    return;
  }
  if (!(R.left = opendir(r->path))) { conn_error(c, r->id, "internal", errno, "RESTORE: open %s", r->path); return; }
  snprintf(R.dir, sizeof R.dir, "%s", r->path);
  R.src.on = on_criu;
  R.conn = c;
  R.request = r->id;
  R.give_up = A.now + RESTORE_NS;
  timer_want(R.give_up);
  A.helpers++;
  next();
}

uint64_t restore_tick(void) {
  if (!R.give_up) return NEVER;
  if (A.now < R.give_up) return R.give_up;
  char name[ID_SIZE + 4];
  R.give_up = A.now + RESTORE_NS;
  if (R.cmd && command_group(R.cmd, name)) group_kill(name); // the end of criu says the rest
  return R.give_up;
}

void restore_forget(const struct conn *c) {
  if (R.conn == c) R.conn = NULL;
}
