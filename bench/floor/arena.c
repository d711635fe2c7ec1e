#include "arena.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/loop.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct arena arena = {.disk_bytes = 1u << 30, .memory_bytes = 256u << 20, .pids = 256, .cpu_milli = 1000, .base = "/mnt"};
static int medium = -1;

void die(const char *format, ...) {
  int err = errno;
  va_list a;
  va_start(a, format);
  vfprintf(stderr, format, a);
  va_end(a);
  fprintf(stderr, ": %s\n", strerror(err));
  exit(1);
}

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void name_of(char *name, size_t size, int worker, int i) { snprintf(name, size, "%d-%d", worker, i); }

// ---- the place ------------------------------------------------------------------------------------------------------------------------
static void make(const char *format, int n) {
  char path[128], tail[64];
  snprintf(tail, sizeof tail, format, n);
  snprintf(path, sizeof path, "%s/%s", arena.base, tail);
  if (mkdir(path, 0755)) die("make %s", path);
}

static void medium_mount(void) {
  char dev[32];
  int image = open(arena.medium, O_RDWR | O_CLOEXEC), control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), loop;
  if (image < 0 || control < 0) die("open %s and /dev/loop-control", arena.medium);
  for (int tries = 0;; tries++) {
    int n = ioctl(control, LOOP_CTL_GET_FREE);
    snprintf(dev, sizeof dev, "/dev/loop%d", n);
    if (n < 0 || (loop = open(dev, O_RDWR | O_CLOEXEC)) < 0) die("get a loop device");
    struct loop_config c = {.fd = (uint32_t)image, .block_size = 4096, .info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO};
    if (!ioctl(loop, LOOP_CONFIGURE, &c)) break;
    if (errno != EBUSY || tries == 32) die("attach %s to %s", arena.medium, dev);
    close(loop);                       // somebody else took it first
  }
  if (mount(dev, "/mnt/medium", "btrfs", MS_NOATIME | MS_NODEV | MS_NOSUID, "nodatacow,nodiscard")) die("mount %s", arena.medium);
  close(loop);
  close(image);
  close(control);
  if ((medium = open("/mnt/medium", O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) die("open the medium");
  struct btrfs_ioctl_quota_ctl_args q = {.cmd = 4 /* simple quotas, Linux 6.7 */};
  if (!ioctl(medium, BTRFS_IOC_QUOTA_CTL, &q) || errno == EEXIST) return;
  q.cmd = BTRFS_QUOTA_CTL_ENABLE;
  if (ioctl(medium, BTRFS_IOC_QUOTA_CTL, &q) && errno != EEXIST) die("switch quotas on");
}

static void small_root(void) {
  static const struct { const char *name; int major, minor; } nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8},
                                                                         {"urandom", 1, 9}, {"tty", 5, 0}};
  char path[64];
  make("proc", 0);
  make("dev", 0);
  if (mount("proc", "/mnt/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) die("mount proc");
  if (mount("tmpfs", "/mnt/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k")) die("mount /dev");
  for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++) {
    snprintf(path, sizeof path, "/mnt/dev/%s", nodes[i].name);
    if (mknod(path, S_IFCHR | 0666, (dev_t)(nodes[i].major << 8 | nodes[i].minor))) die("make %s", path);
  }
  make("dev/pts", 0);
  make("dev/shm", 0);
  make("dev/empty", 0);
  if (symlink("pts/ptmx", "/mnt/dev/ptmx") || symlink("/proc/self/fd", "/mnt/dev/fd")) die("make the links of /dev");
  if (mount(NULL, "/mnt/dev", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL)) die("make /dev read-only");
  if (chdir("/mnt") || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) die("enter the small root");
  arena.base = "";
}

static void groups_open(void);

void arena_enter(int small, int hide_v2, int parallel) {
  char path[64];
  if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("make a mount namespace");
  groups_open();
  if (hide_v2 && umount2("/sys/fs/cgroup/unified", MNT_DETACH) && errno != ENOENT && errno != EINVAL) die("hide the v2 tree");
  if (mount("arena", "/mnt", "tmpfs", 0, "mode=755")) die("mount a tmpfs on /mnt");
  make("medium", 0);
  for (int i = 0; i < arena.nlowers; i++) {
    make("l%d", i);
    snprintf(path, sizeof path, "/mnt/l%d", i);
    if (mount(arena.images[i], path, "erofs", MS_RDONLY | MS_NODEV, NULL)) die("mount %s", arena.images[i]);
  }
  for (int w = 0; w < parallel; w++) { // a worker's scratch: places for lowers, a tmpfs, the overlay
    make("w%d", w);
    make("w%d/t", w);
    make("w%d/m", w);
    for (int i = 0; i < arena.nlowers; i++) {
      snprintf(path, sizeof path, "w%%d/l%d", i);
      make(path, w);
    }
  }
  if (arena.medium) medium_mount();
  if (small) small_root();
}

// ---- mounts ---------------------------------------------------------------------------------------------------------------------------
static char stack[16384] __attribute__((aligned(16)));
static int wait_for_kill(void *unused) {
  (void)unused;
  for (;;) pause();
  return 0;
}

int userns_make(void) {
  static const char *const files[] = {"uid_map", "gid_map"};
  char path[64], map[64];
  pid_t pid = clone(wait_for_kill, stack + sizeof stack, CLONE_NEWUSER | CLONE_VM | SIGCHLD, NULL);
  if (pid < 0) die("make a user namespace");
  snprintf(map, sizeof map, "0 %u 65536", UID_BASE);
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, map, strlen(map)) < 0) die("map the ids");
    close(fd);
  }
  snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
  int ns = open(path, O_RDONLY | O_CLOEXEC);
  if (ns < 0) die("open %s", path);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  return ns;
}

int detached(const char *type, const char *const *options, unsigned attributes) {
  int fs = fsopen(type, FSOPEN_CLOEXEC);
  if (fs < 0) die("open the file system %s", type);
  for (; options && *options; options += 2)
    if (fsconfig(fs, options[1] ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, options[0], options[1], 0)) die("set %s of %s", options[0], type);
  if (fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) die("make a %s", type);
  int fd = fsmount(fs, FSMOUNT_CLOEXEC, attributes);
  if (fd < 0) die("mount a %s", type);
  close(fs);
  return fd;
}

void attach(int mount, const char *path) {
  if (move_mount(mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)) die("attach a mount to %s", path);
  close(mount);
}

int mapped_copy(const char *path, int userns) {
  int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
  struct mount_attr a = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)(unsigned)userns};
  if (fd < 0 || (userns >= 0 && mount_setattr(fd, "", AT_EMPTY_PATH, &a, sizeof a))) die("map the ids of %s", path);
  return fd;
}

int layer_make(int worker, int i) {
  if (!arena.medium) return -1;
  struct btrfs_ioctl_vol_args v = {0};
  struct btrfs_ioctl_ino_lookup_args where = {.objectid = BTRFS_FIRST_FREE_OBJECTID};
  name_of(v.name, 64, worker, i);
  if (ioctl(medium, BTRFS_IOC_SUBVOL_CREATE, &v)) die("make the subvolume %s", v.name);
  int fd = openat(medium, v.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0 || ioctl(fd, BTRFS_IOC_INO_LOOKUP, &where)) die("open the subvolume %s", v.name);
  struct btrfs_ioctl_qgroup_limit_args l = {.qgroupid = where.treeid, .lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = arena.disk_bytes}};
  if (ioctl(fd, BTRFS_IOC_QGROUP_LIMIT, &l)) die("limit the subvolume %s", v.name);
  return fd;
}

void layer_remove(int worker, int i) {
  if (!arena.medium) return;
  struct btrfs_ioctl_vol_args v = {0};
  name_of(v.name, 64, worker, i);
  if (ioctl(medium, BTRFS_IOC_SNAP_DESTROY, &v)) die("remove the subvolume %s", v.name);
}

void lowers_mount(int worker, int userns) {
  char from[64], to[64];
  for (int i = 0; i < arena.nlowers; i++) {
    snprintf(from, sizeof from, "%s/l%d", arena.base, i);
    snprintf(to, sizeof to, "%s/w%d/l%d", arena.base, worker, i);
    attach(mapped_copy(from, userns), to);
  }
}

void overlay_mount(int worker, int i, int layer, const char *target) {
  char place[64], tmpfs[80], name[16], size[32];
  snprintf(place, sizeof place, "%s/w%d", arena.base, worker);
  snprintf(tmpfs, sizeof tmpfs, "%s/t", place);
  snprintf(size, sizeof size, "%llu", (unsigned long long)arena.disk_bytes);
  const char *const options[] = {"size", size, "mode", "0755", NULL};
  if (layer < 0) attach(detached("tmpfs", options, MOUNT_ATTR_NODEV), tmpfs);
  // by path: an overlay takes no upper directory from another mount namespace, and the descriptor is of our parent's
  char id[64], volume[128];
  name_of(id, sizeof id, worker, i);
  snprintf(volume, sizeof volume, "%s/medium/%s", arena.base, id);
  if (chdir(layer < 0 ? tmpfs : volume)) die("enter the writable layer");
  if (mkdir("u", 0755) || mkdir("w", 0700) || chown("u", UID_BASE, UID_BASE) || chown("w", UID_BASE, UID_BASE)) die("make the upper directories");
  int fs = fsopen("overlay", FSOPEN_CLOEXEC);
  if (fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "upperdir", "u", 0) || fsconfig(fs, FSCONFIG_SET_STRING, "workdir", "w", 0) ||
      fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0) || chdir(place)) die("prepare the overlay");
  for (int l = arena.nlowers - 1; l >= 0; l--) {       // topmost first
    snprintf(name, sizeof name, "l%d", l);
    if (fsconfig(fs, FSCONFIG_SET_STRING, "lowerdir+", name, 0)) die("add the lower %s", name);
  }
  if (fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) die("make the overlay");
  int fd = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV);
  if (fd < 0) die("mount the overlay");
  close(fs);
  attach(fd, target);
}

// ---- cgroups --------------------------------------------------------------------------------------------------------------------------
enum { MEMORY, PIDS, CPU, V2, TREES };
static const char *const roots[TREES][2] = {{"/sys/fs/cgroup/memory", NULL}, {"/sys/fs/cgroup/pids", NULL}, {"/sys/fs/cgroup/cpu", NULL},
                                            {"/sys/fs/cgroup/unified", "/sys/fs/cgroup"}};
static int tree[TREES], parent[TREES]; // descriptors; -1: this controller lives in v2

static int put(int dir, const char *path, const char *text) {
  int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
  int bad = fd < 0 || write(fd, text, strlen(text)) < 0, err = errno;
  if (fd >= 0) close(fd);
  errno = err;
  return bad ? -1 : 0;
}

static void groups_open(void) {
  for (int t = 0; t < TREES; t++) {
    tree[t] = open(roots[t][0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (tree[t] < 0 && roots[t][1]) tree[t] = open(roots[t][1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    parent[t] = -1;
    if (tree[t] < 0) continue;
    if (mkdirat(tree[t], arena.cgroup, 0755) || (parent[t] = openat(tree[t], arena.cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
      die("make the cgroup %s in %s", arena.cgroup, roots[t][0]);
  }
  if (parent[V2] < 0) die("open the v2 tree");
  static const char *const words[] = {"+memory", "+pids", "+cpu"};
  for (int t = 0; t < V2; t++)
    if (parent[t] < 0 && (put(tree[V2], "cgroup.subtree_control", words[t]) || put(parent[V2], "cgroup.subtree_control", words[t])))
      die("switch on the controller %s", words[t] + 1);
}

int groups_make(int worker, int i) {
  char name[64], text[32];
  int fd[TREES];
  name_of(name, sizeof name, worker, i);
  for (int t = 0; t < TREES; t++)
    if (parent[t] >= 0 && (mkdirat(parent[t], name, 0755) || (fd[t] = openat(parent[t], name, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0))
      die("make the cgroup %s", name);
  snprintf(text, sizeof text, "%llu", (unsigned long long)arena.memory_bytes);
  if (parent[MEMORY] >= 0 ? put(fd[MEMORY], "memory.limit_in_bytes", text) || (put(fd[MEMORY], "memory.memsw.limit_in_bytes", text) && errno != ENOENT)
                          : put(fd[V2], "memory.max", text)) die("limit memory");
  snprintf(text, sizeof text, "%u", arena.pids);
  if (put(fd[parent[PIDS] >= 0 ? PIDS : V2], "pids.max", text)) die("limit processes");
  snprintf(text, sizeof text, parent[CPU] >= 0 ? "%u" : "%u 100000", arena.cpu_milli * 100);
  if (parent[CPU] >= 0 ? put(fd[CPU], "cpu.cfs_quota_us", text) : put(fd[V2], "cpu.max", text)) die("limit the CPU");
  for (int t = 0; t < V2; t++) if (parent[t] >= 0) close(fd[t]);
  return fd[V2];
}

void groups_join(int worker, int i) {
  char path[96], name[64];
  name_of(name, sizeof name, worker, i);
  snprintf(path, sizeof path, "%s/cgroup.procs", name);
  for (int t = 0; t < V2; t++)
    if (parent[t] >= 0 && put(parent[t], path, "0")) die("join the cgroup %s", name);
}

void groups_remove(int worker, int i) {
  char name[64];
  name_of(name, sizeof name, worker, i);
  for (int t = 0; t < TREES; t++)
    for (int tries = 0; parent[t] >= 0 && unlinkat(parent[t], name, AT_REMOVEDIR); tries++) {
      if (errno != EBUSY || tries == 2000) die("remove the cgroup %s", name);
      usleep(100);                     // busy for a moment after its last process
    }
}

void groups_close(void) {
  for (int t = 0; t < TREES; t++) {
    if (parent[t] < 0) continue;
    DIR *left = fdopendir(openat(parent[t], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (struct dirent *e; left && (e = readdir(left));) // what a failed worker left
      if (e->d_type == DT_DIR && e->d_name[0] != '.') unlinkat(parent[t], e->d_name, AT_REMOVEDIR);
    if (left) closedir(left);
    for (int tries = 0; unlinkat(tree[t], arena.cgroup, AT_REMOVEDIR); tries++) {
      if (errno != EBUSY || tries == 2000) die("remove the cgroup %s", arena.cgroup);
      usleep(100);
    }
  }
}

// ---- the loop -------------------------------------------------------------------------------------------------------------------------
static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

void arena_run(int total, int parallel, void (*one)(int, int)) {
  double *took = mmap(NULL, sizeof *took * (size_t)total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (took == MAP_FAILED) die("get memory");
  double began = now();
  for (int w = 0; w < parallel; w++) {
    pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid) continue;
    for (int i = w; i < total; i += parallel) {
      double t = now();
      one(w, i);
      took[i] = now() - t;
    }
    _exit(0);
  }
  int status, bad = 0;
  while (wait(&status) > 0) bad |= status;
  double seconds = now() - began;
  groups_close();
  if (bad) { fprintf(stderr, "a worker failed\n"); exit(1); }
  qsort(took, (size_t)total, sizeof *took, ascending);
  printf("{\"n\": %d, \"parallel\": %d, \"seconds\": %.6f, \"rate\": %.2f, \"p50_ms\": %.4f, \"p99_ms\": %.4f}\n", total, parallel, seconds,
         total / seconds, took[total / 2] * 1e3, took[(long)total * 99 / 100] * 1e3);
}
