// RESTORE: commands of another sandbox go on in this one, which is new. One criu after the other, each a child of ours in the group of its
// command; the tasks that it makes stay when it ends, and the first of them is our child like any command's.
//
// A criu and the tasks in the making have rights that no command has. So nothing that was restored runs before the last criu has ended: each asks
// before it lets its tasks go (join.c), it leaves their group and that is frozen. What it made is believed when we have looked at it: a process
// with more rights than a command has, without the filter of system calls, or in another namespace is the end of the sandbox.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
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

static struct {
  struct source src, gate;             // pidfd of criu; it asks here
  struct conn *conn;
  uint32_t request;
  char dir[PATH_MAX - 64];
  DIR *left;                           // commands still to come
  struct command *cmd;
  struct memory m;
  pid_t criu;
  int log;
  uint64_t give_up;
  int begun, goes_on;                  // so many of them; goes_on: they were commands of this sandbox, and their logs go on, too
} R = {.src.fd = -1, .gate.fd = -1, .log = -1};

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

static int freeze(const struct command *cmd, int on) {
  char group[ID_SIZE + 4], path[ID_SIZE + 32];
  if (!command_group(cmd, group)) return -1;
  snprintf(path, sizeof path, "%s/cgroup.freeze", group);
  return write_at(A.s->cgroup_fd, path, on ? "1" : "0");
}

// One of this sandbox that does not go on.
static void end(struct command *cmd, int flag) {
  for (int i = 0; i < 2; i++)
    if (cmd->chan[i]) channel_close(cmd->chan[i]);
  cmd->verdict = END_KILLED;
  cmd->ended_by = (uint8_t)flag;
  cmd->forced = 1;
  command_status(cmd, CLD_KILLED, SIGKILL, 0, 0);
}

static void failed(const struct fault *f) {
  char name[ID_SIZE + 4];
  for (struct command *cmd = A.live; cmd; cmd = cmd->next) {
    if (!command_group(cmd, name) || cmd->state != C_RUNNING) continue;
    cmd->verdict = END_KILLED;
    cmd->ended_by = R.goes_on ? R_HIBERNATED : 0;
    cmd->forced = 1;
    group_kill(name);
  }
  if (R.cmd && R.goes_on) end(R.cmd, R_HIBERNATED);
  else if (R.cmd) command_discard(R.cmd);
  R.cmd = NULL;
  done(f);
}

// From here on the images are of the past.
static int used_up(struct fault *f) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/" KEPT_FILE, R.dir);
  int dir = open(R.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = dir < 0 || (unlink(path) && errno != ENOENT) || fsync(dir);
  close_fd(&dir);
  return bad ? fault_host(f, errno, "use the images in %s up", R.dir) : 0;
}

// All are there: they run, and their time with them.
static void all_run(void) {
  struct fault f = {0};
  if (R.goes_on && used_up(&f)) { failed(&f); return; }
  refresh();
  for (struct command *cmd = A.live; cmd; cmd = cmd->next) {
    if (cmd->state != C_RUNNING) continue;
    if (freeze(cmd, 0)) { fault_host(&f, errno, "let command %s run", cmd->rec.command); break; }
    cmd->started = A.now;
    if (cmd->left_ns != NEVER) cmd->deadline = A.now + cmd->left_ns;
    timer_want(cmd->deadline);
  }
  if (f.code) failed(&f);
  else done(&f);
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
  for (int i = 0; R.goes_on && i < 2; i++)
    if (log_resume(&cmd->log[i], m->total[i], m->room[i])) cmd->rec.flags |= R_LOG_EVICTED;
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
  R.gate.fd = c.gate;
  loop_want(&R.src, EPOLLIN);
  loop_want(&R.gate, EPOLLIN);
  bad = 0;
out:
  for (int i = 0; i < c.npipes; i++) close_fd(&c.pipes[i]);
  for (int i = 0; i < CRIU_PIPES; i++) close_fd(&here[i]);
  close(c.group);
  close(dir);
  return bad;
}

// ---- what it made -------------------------------------------------------------------------------------------------------------------------

// All tasks of the command are there and stand still in criu's hands. It leaves the group, which is frozen, and lets go.
static void on_gate(struct source *src, uint32_t events) {
  (void)events;
  char byte, pid[16];
  snprintf(pid, sizeof pid, "%d", R.criu);
  if (read(src->fd, &byte, 1) == 1 && !write_at(A.s->cgroup_fd, "cgroup.procs", pid) && !freeze(R.cmd, 1)) (void)!write(src->fd, &byte, 1);
  loop_close(src);                     // without an answer it gives up, and says so when it ends
}

static void take_class(int32_t pid) {
  char path[48];
  if (R.m.cpu_class == A.s->spec.cpu_class) return;
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR *d = opendir(path);
  for (struct dirent *e; d && (e = readdir(d));)
    if (e->d_name[0] != '.') class_give(&A.s->spec, atoi(e->d_name));
  if (d) closedir(d);
}

static int adopt(struct fault *f) {
  static int32_t pids[MOST_PIDS];
  struct command *cmd = R.cmd;
  char group[ID_SIZE + 4];
  struct seen p;
  command_group(cmd, group);
  size_t n = group_pids(group, pids, MOST_PIDS);
  for (size_t i = 0; i < n; i++) {
    if (!process_confined(pids[i])) return fault_set(f, "internal", 0, "command %s was restored with rights that it had not", cmd->rec.command);
    if (process_look(pids[i], &p)) continue;
    if (p.parent == getpid()) cmd->pid = pids[i];
    take_class(pids[i]);
  }
  int pidfd = cmd->pid > 0 ? sys_pidfd_open(cmd->pid) : -1;
  if (pidfd < 0) return fault_set(f, "checkpoint_failed", 0, "command %s was restored, and died at once", cmd->rec.command);
  cmd->left_ns = R.m.left_ns;
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
  loop_close(&R.gate);
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

static int names_command(const struct dirent *e) { return e->d_name[0] != '.' && strcmp(e->d_name, KEPT_FILE) != 0; }

static void next(void) {
  struct fault f = {0};
  struct dirent *e;
  do e = readdir(R.left);
  while (e && !names_command(e));
  if (!e) all_run();
  else if (begin(e->d_name, &f)) failed(&f);
}

// None of them goes on: each that has no record yet gets one.
static void record_ends(struct conn *c, const struct request *r, int flag) {
  struct fault f = {0};
  DIR *d = opendir(r->path);
  if (!d) { conn_error(c, r->id, "internal", errno, "RESTORE: open %s", r->path); return; }
  snprintf(R.dir, sizeof R.dir, "%s", r->path);
  R.goes_on = 1;
  for (struct dirent *e; !f.code && (e = readdir(d));) {
    struct command *cmd = names_command(e) ? command_find(e->d_name) : NULL;
    if (cmd) command_unref(cmd);
    if (cmd || !names_command(e)) continue;
    int dir = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0 && !read_memory(dir, &f) && (cmd = make_command(&f))) end(cmd, flag);
    close_fd(&dir);
  }
  closedir(d);
  if (f.code) conn_error(c, r->id, f.code, f.err, "%s", f.message);
  else conn_ok(c, r->id);
}

void restore_start(struct conn *c, struct request *r) {
  int flag = left_because(r->cause);
  if (!r->path || *r->path != '/' || strlen(r->path) >= sizeof R.dir || (r->cause && !flag)) {
    conn_error(c, r->id, "invalid_request", 0, "RESTORE: a directory is needed");
    return;
  }
  if (R.left && !R.conn && !strcmp(R.dir, r->path) && !flag) {           // whoever asked first is gone
    R.conn = c;
    R.request = r->id;
    return;
  }
  if (R.left || (A.running && !flag)) { conn_error(c, r->id, "invalid_request", 0, "RESTORE: a sandbox is needed in which nothing runs"); return; }
  if (flag) { record_ends(c, r, flag); return; }
  if (node.criu < 0 || !A.s->spec.own_pids) { conn_error(c, r->id, "unsupported", 0, "RESTORE: this sandbox was not made for it"); return; }
  if (!(R.left = opendir(r->path))) { conn_error(c, r->id, "internal", errno, "RESTORE: open %s", r->path); return; }
  snprintf(R.dir, sizeof R.dir, "%s", r->path);
  R.src.on = on_criu;
  R.gate.on = on_gate;
  R.conn = c;
  R.request = r->id;
  R.goes_on = r->goes_on != 0;
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
  if (R.cmd && command_group(R.cmd, name)) group_kill(name);
  if (R.src.fd >= 0) sys_pidfd_kill(R.src.fd, SIGKILL);  // its end says the rest
  return R.give_up;
}

void restore_forget(const struct conn *c) {
  if (R.conn == c) R.conn = NULL;
}
