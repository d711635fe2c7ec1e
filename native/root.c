// The node's mount namespace: a small tmpfs root that only the launcher and the aethers see. A sandbox starts as a copy of it, so it
// holds few mounts; and nothing that is mounted here ever appears on the host.
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

int dev_fill(int d) {
  static const struct { const char *name; unsigned minor; } nodes[] = {{"null", 3}, {"zero", 5}, {"full", 7}, {"random", 8}, {"urandom", 9}};
  static const char *const links[][2] = {{"pts/ptmx", "ptmx"}, {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"},
                                         {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}};
  static const char *const dirs[] = {"pts", "shm", "mqueue"};
  int bad = mknodat(d, "tty", S_IFCHR | 0666, makedev(5, 0));
  for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++) bad |= mknodat(d, nodes[i].name, S_IFCHR | 0666, makedev(1, nodes[i].minor));
  for (unsigned i = 0; i < sizeof links / sizeof *links; i++) bad |= symlinkat(links[i][0], d, links[i][1]);
  for (unsigned i = 0; i < sizeof dirs / sizeof *dirs; i++) bad |= mkdirat(d, dirs[i], 0755);
  return bad;
}

static int dev_template(void) {
  if (mount("tmpfs", "." NODE_DEV, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=32")) return -1;
  int d = open("." NODE_DEV, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (d < 0) return -1;
  int bad = dev_fill(d);
  close(d);
  return bad || mount(NULL, "." NODE_DEV, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL) ? -1 : 0;
}

static int scratch(void) {
  char name[64];
  if (mkdir("." NODE_SCRATCH, 0700) || mkdir("." NODE_SCRATCH "/m", 0755)) return -1;
  for (int i = 0; i < MAX_LAYERS; i++) {
    snprintf(name, sizeof name, "." NODE_SCRATCH "/l%d", i);
    if (mkdir(name, 0755)) return -1;
  }
  return 0;
}

// A directory of the host, at the same path. It is taken before the new root covers anything and attached when that is there.
static int take(const char *path, struct fault *f) {
  if (make_dirs(path, 0755)) return fault_host(f, errno, "make %s", path);
  int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
  return fd < 0 ? fault_host(f, errno, "take %s into the node's root", path) : fd;
}

static int give(int fd, const char *path, struct fault *f) {
  char to[4200];
  snprintf(to, sizeof to, ".%s", path);
  int bad = make_dirs(to, 0755) || attach(fd, to), err = errno;
  close(fd);
  return bad ? fault_host(f, err, "bind %s into the node's root", path) : 0;
}

int root_make(struct fault *f) {
  if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return fault_host(f, errno, "make a mount namespace");
  umask(0);                            // the modes of device nodes are meant as they are written
  int run = take(node.run, f), state = run < 0 ? -1 : take(node.state, f);
  if (state < 0) return -1;
  // any directory of the host will do as the place where the new root is stacked
  if (mount("dsec", "/tmp", "tmpfs", 0, "mode=755,size=4m") || chdir("/tmp")) return fault_host(f, errno, "mount the node's root");
  static const char *const dirs[] = {"/proc", "/.node", NODE_DEV, NODE_LAYERS, NODE_MEDIUM, NODE_LOOP};
  for (unsigned i = 0; i < sizeof dirs / sizeof *dirs; i++)
    if (mkdir(dirs[i] + 1, 0755)) return fault_host(f, errno, "make %s in the node's root", dirs[i]);
  if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return fault_host(f, errno, "mount proc in the node's root");
  if (dev_template()) return fault_host(f, errno, "make the template of /dev");
  if (scratch()) return fault_host(f, errno, "make the scratch mount points");
  if (give(run, node.run, f) || give(state, node.state, f)) return -1;
  int mark = open("." NODE_MARK, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (mark < 0 || write(mark, node.cgroup, strlen(node.cgroup)) < 0) return fault_host(f, errno, "mark the node's root");
  close(mark);
  if (sys_pivot_root(".", ".") || umount2(".", MNT_DETACH) || chdir("/")) return fault_host(f, errno, "enter the node's root");
  return 0;
}

int root_join(pid_t aether, struct fault *f) {
  char path[64], mark[256];
  snprintf(path, sizeof path, "/proc/%d/ns/mnt", aether);
  int ns = open(path, O_RDONLY | O_CLOEXEC);
  if (ns < 0) return fault_set(f, "internal", errno, "join the mounts of the aether with pid %d", aether);
  int bad = setns(ns, CLONE_NEWNS), err = errno;
  close(ns);
  if (bad) return fault_set(f, "internal", err, "join the mounts of the aether with pid %d", aether);
  if (read_at(AT_FDCWD, NODE_MARK, mark, sizeof mark) < 0 || strcmp(mark, node.cgroup))
    return fault_set(f, "internal", 0, "process %d is not an aether of %s", aether, node.cgroup);
  return 0;
}

int host_open(const char *path, int flags) {
  if (setns(node.host_ns, CLONE_NEWNS)) return -1;
  int fd = open(path, flags | O_CLOEXEC, 0600), err = errno;
  if (setns(node.own_ns, CLONE_NEWNS)) _exit(70);        // in the wrong namespace nothing may be done at all
  errno = err;
  return fd;
}
