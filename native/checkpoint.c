// CHECKPOINT: the memory of every running command, as images of criu, beside the copy of the writable volume. All happens in the child that
// takes the snapshot, while the sandbox's group is frozen: criu holds the processes by ptrace while it thaws the group, and freezes it again
// before it lets go, so nothing runs between the first image and the copy of the files.
//
// What cannot go on in another sandbox is refused by name: nothing is left out in silence.
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define DUMP_MS 60000
#define GHOSTS "256M"                 // of a file that is open and has no name any more
#define KERNEL_FILE "criu.kdat"

uint64_t pipe_inode(int fd) {
  struct stat st;
  return fd >= 0 && !fstat(fd, &st) && S_ISFIFO(st.st_mode) ? st.st_ino : 0;
}

// The pipe at the program's stdin, and what in it was not read yet, which goes into a file.
static int stdin_of(const struct command *cmd, int dir, struct memory *m, struct fault *f) {
  char path[48];
  int copy[2], bad = 0;
  m->input = cmd->in.fd >= 0 && !cmd->eof_in;
  snprintf(path, sizeof path, "/proc/%d/fd/0", cmd->pid);
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  m->pipe[0] = cmd->in_pipe;
  if (!m->pipe[0] || pipe_inode(fd) != m->pipe[0]) { close_fd(&fd); return 0; } // it reads it no more
  if (pipe2(copy, O_CLOEXEC)) { close(fd); return fault_host(f, errno, "make a pipe"); }
  fcntl(copy[1], F_SETPIPE_SZ, 1 << 20);
  ssize_t n = tee(fd, copy[1], 1 << 20, SPLICE_F_NONBLOCK);
  int file = n > 0 ? openat(dir, INPUT_FILE, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
  for (ssize_t k; !bad && n > 0; n -= k)
    if ((k = splice(copy[0], NULL, file, NULL, (size_t)n, 0)) <= 0) bad = fault_host(f, errno, "keep the input of command %s", cmd->rec.command);
  close_fd(&file);
  close(fd);
  close(copy[0]);
  close(copy[1]);
  return bad;
}

static int wait_for(const char *command, pid_t pid, int pidfd, int log, struct fault *f) {
  struct pollfd p = {.fd = pidfd, .events = POLLIN};
  int status = -1, ready;
  char who[64], why[120];
  do ready = poll(&p, 1, DUMP_MS);
  while (ready < 0 && errno == EINTR);
  if (ready <= 0) sys_pidfd_kill(pidfd, SIGKILL);
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
  snprintf(who, sizeof who, "command %s", command);
  if (ready <= 0) return fault_set(f, "checkpoint_failed", 0, "%s was not copied within %d s, and may be damaged", who, DUMP_MS / 1000);
  if (!status) return 0;
  criu_reason(log, why, sizeof why);
  return refuse_copy(f, who, why);
}

uint8_t *number_in(uint8_t *p, uint8_t *end, const unsigned *path) {
  while (p + 1 < end) {
    unsigned field = *p >> 3, type = *p & 7;
    if (*p++ & 0x80) return NULL;      // fields beyond 15 come behind what we look for
    if (type > 2) return NULL;
    uint8_t *value = p;
    size_t n = 0;
    int shift = 0;
    do n |= (size_t)(*p & 0x7f) << shift, shift += 7;
    while (*p++ & 0x80 && p < end && shift < 63);
    if (field == *path && !type && !path[1]) return value;
    if (!type) continue;
    if (type == 1 || n > (size_t)(end - p)) return NULL;
    if (field == *path && path[1]) return number_in(p, p + n, path + 1);
    p += n;
  }
  return NULL;
}

// To the criu that dumped, the tasks are in another user namespace, so that ids in the images are those inside. The one that restores is in the
// sandbox's already and shall not make another: its own namespace gets the number of theirs.
static int same_user_namespace(int dir, int32_t inner, struct fault *f) {
  static const unsigned root_ids[] = {3, 10, 0}, ids[] = {10, 0};
  enum { INVENTORY_AT = 8, IDS_AT = 12 };                // behind magic numbers and length
  uint8_t inventory[4096], task[4096];
  char name[32];
  snprintf(name, sizeof name, "ids-%d.img", inner);
  int one = openat(dir, "inventory.img", O_RDWR | O_CLOEXEC), two = openat(dir, name, O_RDONLY | O_CLOEXEC);
  ssize_t n = one < 0 ? -1 : read(one, inventory, sizeof inventory), k = two < 0 ? -1 : read(two, task, sizeof task);
  uint8_t *to = n > INVENTORY_AT ? number_in(inventory + INVENTORY_AT, inventory + n, root_ids) : NULL;
  uint8_t *from = k > IDS_AT ? number_in(task + IDS_AT, task + k, ids) : NULL;
  int bad = !to || !from || *to & 0x80 || *from & 0x80 || pwrite(one, from, 1, to - inventory) != 1;
  close_fd(&one);
  close_fd(&two);
  return bad ? fault_set(f, "internal", 0, "the images of criu are not as expected") : 0;
}

// The one that restores has no right to find out.
static int about_kernel(int dir, struct fault *f) {
  int from = openat(node.cache, KERNEL_FILE, O_RDONLY | O_CLOEXEC), to = openat(dir, KERNEL_FILE, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  ssize_t n = from < 0 || to < 0 ? -1 : copy_file_range(from, NULL, to, NULL, 1 << 20, 0);
  if (n < 0 && errno == EXDEV) n = sendfile(to, from, NULL, 1 << 20);
  if (n <= 0) fault_host(f, errno, "keep what criu knows of the kernel");
  close_fd(&from);
  close_fd(&to);
  return n > 0 ? 0 : -1;
}

// What restores them is root of the sandbox and nobody on the host. What they take is taken off `most`.
static int hand_over(int dir, uint64_t *most, struct fault *f) {
  struct stat st;
  int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = 0;
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  uint32_t base = A.s->spec.uid_base;
  if (!d) { close_fd(&copy); return fault_host(f, errno, "list the images"); }
  for (struct dirent *e; !bad && (e = readdir(d));) {
    if (e->d_type != DT_REG) continue;
    bad = fchmodat(dir, e->d_name, 0600, 0) || fchownat(dir, e->d_name, base, base, AT_SYMLINK_NOFOLLOW) || fstatat(dir, e->d_name, &st, 0);
    if (!bad) *most -= (uint64_t)st.st_size < *most ? (uint64_t)st.st_size : *most;
  }
  bad = bad || fchown(dir, base, base);
  if (bad) fault_host(f, errno, "hand the images over");
  closedir(d);
  return bad ? -1 : 0;
}

static int describe(const struct command *cmd, int dir, int32_t inner, int32_t last, struct memory *m, struct fault *f) {
  m->magic = MEMORY_MAGIC;
  m->pid = (uint32_t)inner;
  m->rec = cmd->rec;
  m->definition = cmd->definition;
  m->timeout_ns = cmd->timeout_ns;
  uint64_t now = A.paused ? A.paused : A.now;
  m->left_ns = cmd->deadline == NEVER ? NEVER : cmd->deadline > now ? cmd->deadline - now : 1;
  for (int i = 0; i < 2; i++) m->pipe[1 + i] = cmd->chan[i] ? pipe_inode(cmd->chan[i]->src.fd) : 0;
  m->last_pid = last;
  m->cpu_class = (uint8_t)A.s->spec.cpu_class;
  m->shell = cmd->shell;
  m->stop = cmd->stop;
  int fd = openat(dir, MEMORY_FILE, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  int bad = fd < 0 || write(fd, m, sizeof *m) != sizeof *m;
  if (bad) fault_host(f, errno, "describe command %s", cmd->rec.command);
  close_fd(&fd);
  return bad ? -1 : 0;
}

static int wipe(const struct command *cmd, int dir, struct fault *f) {
  static int32_t pids[MOST_PIDS];
  char group[ID_SIZE + 4];
  struct seen p;
  if (!command_group(cmd, group)) return 0;
  size_t n = group_pids(group, pids, MOST_PIDS);
  for (size_t i = 0; i < n; i++)
    if (!process_look(pids[i], &p) && images_wipe(dir, pids[i], p.inner, f)) return -1;
  return 0;
}

static int dump(const struct command *cmd, const char *where, int32_t highest, uint64_t *most, struct fault *f) {
  char path[4200], pid[16], group[32];
  struct memory m = {0};
  struct seen p;
  int pidfd = -1;
  snprintf(path, sizeof path, "%s/%s", where, cmd->rec.command);
  if (process_look(cmd->pid, &p)) return fault_set(f, "unavailable", 0, "command %s ended meanwhile", cmd->rec.command);
  if (mkdir(path, 0700)) return fault_host(f, errno, "make %s", path);
  int log = memfd_create("log", MFD_CLOEXEC), dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = log < 0 || dir < 0;
  if (bad) fault_host(f, errno, "open %s", path);
  snprintf(pid, sizeof pid, "%d", p.inner);
  snprintf(group, sizeof group, "/proc/self/fd/%d", CRIU_GROUP);
  const char *const args[] = {"dump", "-t", pid, "--leave-running", "--freeze-cgroup", group, "--network-lock", "skip", "--ghost-limit", GHOSTS, "--file-locks", NULL};
  struct criu c = {.args = args, .images = path, .log = log, .most = *most};
  pid_t criu = bad ? -1 : criu_start(A.s, &c, &pidfd, f);
  bad = criu < 0 || wait_for(cmd->rec.command, criu, pidfd, log, f) || same_user_namespace(dir, p.inner, f) || about_kernel(dir, f) || wipe(cmd, dir, f) ||
        stdin_of(cmd, dir, &m, f) || hand_over(dir, most, f) || describe(cmd, dir, p.inner, c.last_pid > highest ? c.last_pid : highest, &m, f);
  close_fd(&pidfd);
  close_fd(&log);
  close_fd(&dir);
  return bad ? -1 : 0;
}

int checkpoint_sync(const char *where, struct fault *f) {
  int root = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = root < 0;
  for (const struct command *cmd = A.live; !bad && cmd; cmd = cmd->next) {
    if (!command_runs(cmd)) continue;
    int dir = openat(root, cmd->rec.command, O_RDONLY | O_DIRECTORY | O_CLOEXEC), again = dir < 0 ? -1 : openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    bad = !d;
    for (struct dirent *e; !bad && (e = readdir(d));) {
      if (e->d_type != DT_REG) continue;
      int fd = openat(dir, e->d_name, O_RDONLY | O_CLOEXEC);
      bad = fd < 0 || fsync(fd);
      close_fd(&fd);
    }
    bad = bad || fsync(dir);
    if (d) closedir(d);
    close_fd(&dir);
  }
  if (bad || fsync(root)) bad = fault_host(f, errno, "write the images in %s to the disk", where);
  close_fd(&root);
  return bad ? -1 : 0;
}

int checkpoint_take(const char *dir, uint64_t most, struct fault *f) {
  int32_t highest;
  if (inside_copyable(&highest, f)) return -1;
  for (const struct command *cmd = A.live; cmd; cmd = cmd->next)
    if (command_runs(cmd) && (dump(cmd, dir, highest, &most, f) || snapshot_freeze(f))) return -1;
  return 0;
}
