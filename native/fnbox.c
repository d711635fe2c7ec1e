// Making and removing the box of one call. The worker is root of the host and does all mounting; yet the box's namespaces belong to the
// container's user namespace, because the zygote, which has no rights but in that one, has to send its child into them. So they are made by
// a process that has entered it, and filled from outside.
#include "fncall.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>
#include "util.h"

#define FIRST_UID 20000                // inside; each call has another one than those before it
#define UIDS 40000
#define STACK 16384

static struct sandbox *resident;
static struct { int mnt, pid, net; } home;               // the worker's own namespaces
static struct born { int pidfd, err; } *born;            // shared with the process between
static char stack[STACK] __attribute__((aligned(16)));
static int proc_fd;

int fnbox_open(struct sandbox *r, struct fault *f) {
  resident = r;
  home.mnt = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
  home.pid = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
  home.net = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  born = mmap(NULL, sizeof *born, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (home.mnt < 0 || home.pid < 0 || home.net < 0 || born == MAP_FAILED) return fault_host(f, errno, "open the worker's namespaces");
  if (mkdirat(r->box->root, "box", 0755) && errno != EEXIST) return fault_host(f, errno, "make /box in %s", r->spec.id);
  return 0;
}

// In the wrong namespace nothing may be done at all.
static void back(int fd, int kind) {
  if (setns(fd, kind)) _exit(70);
}

// PID 1 of the box. It is born with every right in the container's user namespace and gives them up before anything else.
static void __attribute__((noreturn)) become_one(void) {
  static char *const argv[] = {(char *)"init", NULL}, *const env[] = {NULL};
  const struct account nobody = {.name = "root"};
  struct fault f = {0};
  if (privilege_cut(&nobody, KEEP_NONE, &f) || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) || prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) ||
      close_range(0, ~0u, CLOSE_RANGE_CLOEXEC) || filter_load(&init_filter))
    _exit(126);
  execveat(node.init_fd, "", argv, env, AT_EMPTY_PATH);
  _exit(127);
}

// The process between: it is in the box's groups and in the container, shares our descriptors, and makes PID 1 as our child.
static void __attribute__((noreturn)) between(const struct fnbox *b) {
  struct clone_args a = {.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP | CLONE_PARENT | CLONE_PIDFD,
                         .pidfd = (uint64_t)(uintptr_t)&born->pidfd};
  int bad = 0;
  for (int i = 0; i < CG_COUNT; i++)
    if (b->box.join[i] >= 0) bad |= write(b->box.join[i], "0", 1) != 1;
  if (b->cpu_join >= 0) bad |= write(b->cpu_join, "0", 1) != 1;
  bad = bad || setns(resident->init_fd, CLONE_NEWNS | CLONE_NEWUTS) || setns(resident->userns_fd, CLONE_NEWUSER);
  pid_t pid = bad ? -1 : sys_clone3(&a);
  if (!pid) become_one();
  born->err = pid < 0 ? errno : 0;     // its number here is one of the container's: of no use to us
  _exit(0);
}

static pid_t pid_of(int pidfd) {
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
  const char *pid = read_at(AT_FDCWD, path, text, sizeof text) > 0 ? strstr(text, "\nPid:") : NULL;
  return pid ? (pid_t)atoi(pid + 5) : -1;
}

static int namespaces(struct fnbox *b, int warm, struct fault *f) {
  // what /proc/<pid>/cgroup shows begins at the groups of PID 1: those in which the call's process will be
  int group = warm && b->cpu >= 0 ? resident->cgroup_fd : b->s.cgroup_fd;
  struct clone_args a = {.flags = CLONE_FILES | CLONE_VFORK | CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)group};
  *born = (struct born){.pidfd = -1};
  // born in the container's pid namespace: only its children's may be nested in that
  if (setns(resident->init_fd, CLONE_NEWPID)) return fault_host(f, errno, "enter the container of %s", b->id);
  pid_t pid = sys_clone3(&a);
  if (!pid) between(b);
  int err = errno;
  back(home.pid, CLONE_NEWPID);
  if (pid < 0) return fault_lack(f, "processes", err, "start a process for %s", b->id);
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
  if (born->pidfd < 0) return fault_lack(f, "namespaces", born->err ? born->err : EAGAIN, "make the namespaces of %s", b->id);
  b->s.init_fd = born->pidfd;
  b->s.init = pid_of(born->pidfd);
  return b->s.init > 0 ? 0 : fault_set(f, "internal", errno, "find PID 1 of %s", b->id);
}

static int loopback(struct fnbox *b, struct fault *f) {
  struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
  if (setns(b->s.init_fd, CLONE_NEWNET)) return fault_host(f, errno, "enter the network namespace of %s", b->id);
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  int bad = s < 0 || ioctl(s, SIOCSIFFLAGS, &lo), err = errno;
  close_fd(&s);
  back(home.net, CLONE_NEWNET);
  return bad ? fault_host(f, err, "bring the loopback of %s up", b->id) : 0;
}

// /proc shows the pid namespace of whoever mounts it. Processes alone: what the kernel tells of the host there tells one call of another.
static int mount_proc(void *unused) {
  static const char *const options[] = {"source", "proc", "subset", "pid", NULL};
  (void)unused;
  proc_fd = fs_mount("proc", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
  return 0;
}

static int proc(struct fnbox *b, struct fault *f) {
  proc_fd = -1;
  if (setns(b->s.init_fd, CLONE_NEWPID)) return fault_host(f, errno, "enter the pid namespace of %s", b->id);
  pid_t pid = clone(mount_proc, stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_FILES | SIGCHLD, NULL);
  int err = errno;
  back(home.pid, CLONE_NEWPID);
  if (pid < 0) return fault_lack(f, "processes", err, "start a process for %s", b->id);
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
  return proc_fd < 0 ? fault_lack(f, "mounts", errno, "mount /proc of %s", b->id) : 0;
}

// A warm call's process cannot be born in the v2 group, and to move there takes a lock over every fork and exit of the host: where v1 has
// the limits it stays out, and v1 counts its time.
static int clock_make(struct fnbox *b, struct fault *f) {
  if (node.cpuacct < 0 || b->box.v1[CG_MEMORY] < 0) return 0;
  if (mkdirat(node.cpuacct, b->id, 0755) && errno != EEXIST) return fault_lack(f, "cgroups", errno, "make the cpuacct cgroup of %s", b->id);
  b->cpu = openat(node.cpuacct, b->id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  b->cpu_join = b->cpu < 0 ? -1 : openat(b->cpu, "tasks", O_WRONLY | O_CLOEXEC);
  if (b->cpu_join < 0) return fault_host(f, errno, "open the cpuacct cgroup of %s", b->id);
  b->box.clock = b->cpu_join;
  return 0;
}

uint64_t fnbox_cpu(const struct fnbox *b) {
  uint64_t ns = 0, us = 0;
  if (b->cpu >= 0) read_u64(b->cpu, "cpuacct.usage", &ns);
  else if (b->s.cgroup_fd >= 0) read_key(b->s.cgroup_fd, "cpu.stat", "usage_usec", &us);
  return b->cpu >= 0 ? ns : us * 1000;
}

static int scratch(struct fnbox *b, struct fault *f) {
  static const struct { const char *name; mode_t mode; } dirs[] = {{"w", 0700}, {"t", 01777}, {"v", 01777}, {"s", 01777}};
  char size[32];
  snprintf(size, sizeof size, "%llu", (unsigned long long)FN_DISK);
  const char *const options[] = {"source", "tmpfs", "size", size, "nr_inodes", FN_INODES, "mode", "0711", NULL};
  uid_t own = b->s.spec.uid_base + b->uid, root = b->s.spec.uid_base;
  if ((b->scratch = fs_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)) < 0) return fault_lack(f, "mounts", errno, "mount the scratch space of %s", b->id);
  for (unsigned i = 0; i < sizeof dirs / sizeof *dirs; i++)
    if (mkdirat(b->scratch, dirs[i].name, 0700) || fchmodat(b->scratch, dirs[i].name, dirs[i].mode, 0) ||
        fchownat(b->scratch, dirs[i].name, i ? root : own, i ? root : own, 0))
      return fault_host(f, errno, "make the scratch space of %s", b->id);
  return 0;
}

static int place(const char *from, const char *to) {
  int fd = open_tree(AT_FDCWD, from, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
  int bad = fd < 0 || attach(fd, to);
  close_fd(&fd);
  return bad;
}

// The container's tree, read-only, with what is this box's own on top. /box last: it covers the tmpfs whose parts the others are.
static int tree(struct fnbox *b, struct fault *f) {
  struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID};
  if (setns(b->s.init_fd, CLONE_NEWNS)) return fault_host(f, errno, "enter the mounts of %s", b->id);
  int bad = mount_setattr(AT_FDCWD, "/", 0, &readonly, sizeof readonly) || attach(proc_fd, "/proc") ||
            mount("/dev/mqueue", "/dev/pts", NULL, MS_BIND, NULL) || attach(b->scratch, "/box") || place("/box/t", "/tmp") || place("/box/s", "/dev/shm");
  if (!bad && place("/box/v", "/var/tmp")) bad = errno != ENOENT && errno != ENOTDIR && errno != ELOOP && errno != EINVAL;
  bad = bad || place("/box/w", "/box");
  int err = errno;
  back(home.mnt, CLONE_NEWNS);
  close_fd(&proc_fd);
  return bad ? fault_lack(f, "mounts", err, "mount the tree of %s", b->id) : 0;
}

static int look_inside(struct fnbox *b, struct fault *f) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/root", b->s.init);
  if ((b->box.root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) return fault_host(f, errno, "open the root of %s", b->id);
  b->box.null = open_inside(b->box.root, "dev/null", O_RDWR | O_NOCTTY);
  return b->box.null < 0 ? fault_host(f, errno, "open /dev/null of %s", b->id) : 0;
}

void fnbox_plan(struct fnbox *b, int number, uint64_t serial) {
  *b = (struct fnbox){.scratch = -1, .cpu = -1, .cpu_join = -1, .uid = FIRST_UID + (uint32_t)(serial % UIDS)};
  snprintf(b->id, sizeof b->id, FN_GROUP, resident->spec.id, number);
  snprintf(b->user, sizeof b->user, "%u:%u", b->uid, b->uid);
  b->s = (struct sandbox){.init_fd = -1, .listen_fd = -1, .cgroup_fd = -1, .devpts_fd = -1, .oom_fd = -1, .own_net = 1, .box = &b->box};
  b->s.spec = (struct spec){.id = b->id, .user = b->user, .workdir = "/box", .hostname = "fncall", .uid_base = resident->spec.uid_base,
                            .cpu_class = resident->spec.cpu_class, .userns = 1};
  b->s.userns_fd = resident->userns_fd;
  b->s.has_shell = resident->has_shell;
  b->box = (struct box){.volume = -1, .root = -1, .null = -1};
  for (int i = 0; i < CG_COUNT; i++) b->box.v1[i] = b->box.join[i] = -1;
}

int fnbox_build(struct fnbox *b, int warm, struct fault *f) {
  proc_fd = -1;
  int bad = cgroup_make(&b->s, f) || cgroup_groups(&b->s, f) || clock_make(b, f) || scratch(b, f) || namespaces(b, warm, f) || loopback(b, f) ||
            proc(b, f) || tree(b, f) || look_inside(b, f);
  close_fd(&proc_fd);
  return bad ? -1 : 0;
}

int fnbox_resize(struct fnbox *b, uint64_t disk, struct fault *f) {
  char size[32];
  if (disk == FN_DISK) return 0;
  snprintf(size, sizeof size, "%llu", (unsigned long long)disk);
  int fs = fspick(b->scratch, "", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC);
  int bad = fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "size", size, 0) || fsconfig(fs, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0), err = errno;
  close_fd(&fs);
  return bad ? fault_host(f, err, "size the scratch space of %s", b->id) : 0;
}

static int device(int dev, const char *text) {
  unsigned major_number, minor_number;
  char name[128], *slash;
  if (sscanf(text, "%u:%u:%127s", &major_number, &minor_number, name) != 3 || *name == '/' || strstr(name, "..")) {
    errno = EINVAL;
    return -1;
  }
  if ((slash = strchr(name, '/'))) {   // one directory deep, as /dev/nvidia-caps/...
    *slash = 0;
    if (mkdirat(dev, name, 0755) && errno != EEXIST) return -1;
    *slash = '/';
  }
  return mknodat(dev, name, S_IFCHR | 0666, makedev(major_number, minor_number));
}

// A /dev of its own, over the one that all boxes share.
int fnbox_devices(struct fnbox *b, const char *const *devices, int n, struct fault *f) {
  static const char *const options[] = {"source", "dev", "size", "64k", "mode", "0755", NULL};
  struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY};
  mode_t mask = umask(0);
  int dev = fs_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), bad = dev < 0 || dev_fill(dev);
  for (int i = 0; !bad && i < n; i++) bad = device(dev, devices[i]);
  bad = bad || mount_setattr(dev, "", AT_EMPTY_PATH, &readonly, sizeof readonly);
  umask(mask);
  if (!bad && !(bad = setns(b->s.init_fd, CLONE_NEWNS))) {
    int shm = open_tree(b->scratch, "s", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    bad = shm < 0 || attach(dev, "/dev") || attach(shm, "/dev/shm");
    int err = errno;
    close_fd(&shm);
    back(home.mnt, CLONE_NEWNS);
    errno = err;
  }
  int err = errno;
  close_fd(&dev);
  return bad ? fault_host(f, err, "put the devices into %s", b->id) : 0;
}

int fnbox_work(const struct fnbox *b) { return openat(b->scratch, "w", O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

void fnbox_kill(struct fnbox *b) {
  if (b->s.cgroup_fd >= 0) cgroup_kill(b->s.cgroup_fd);
  if (b->s.init_fd >= 0) sys_pidfd_kill(b->s.init_fd, SIGKILL);
}

int fnbox_dead(struct fnbox *b) {
  struct pollfd p = {.fd = b->s.init_fd, .events = POLLIN};
  if (b->s.init_fd < 0) return 1;
  if (poll(&p, 1, 0) <= 0 || (b->s.init > 0 && waitpid(b->s.init, NULL, WNOHANG) == 0)) return 0;
  close_fd(&b->s.init_fd);
  return 1;
}

void fnbox_remove(struct fnbox *b) {
  close_fd(&b->box.root);
  close_fd(&b->box.null);
  close_fd(&b->scratch);
  close_fd(&b->s.oom_fd);
  close_fd(&b->s.cgroup_fd);
  close_fd(&b->cpu_join);
  close_fd(&b->cpu);
  for (int i = 0; i < CG_COUNT; i++) {
    close_fd(&b->box.join[i]);
    close_fd(&b->box.v1[i]);
  }
  if (cgroup_remove(b->id)) fprintf(stderr, "aether %s: remove its groups: %s\n", b->id, strerror(errno));
}
