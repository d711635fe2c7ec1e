// From a copy of the node's mounts to the inside of a sandbox: what the process does that becomes PID 1. It is root of the host while it
// mounts, so that every namespace and mount belongs to the host and root inside can never administer them; then it gives everything up.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"
#include "wire.h"

// Files that tell about the host or steer it are covered by /dev/null, directories by an empty one; what must stay readable is read-only.
static const char *const masked[] = {"kcore", "keys", "timer_list", "kpagecount", "kpagecgroup", "kpageflags", "sysrq-trigger", "kallsyms",
                                     "config.gz", "latency_stats", "sched_debug", "interrupts"};
static const char *const hidden[] = {"scsi", "acpi", "asound"};
static const char *const readonly[] = {"sys", "bus", "fs", "irq"};
#define TERMINALS "64"                 // of one sandbox: the host has some thousands for all
#define COUNT(a) (sizeof(a) / sizeof *(a))

unsigned masks_present(void) {
  unsigned bits = 0, bit = 0;
  char path[64];
  const struct { const char *const *names; size_t n; } lists[] = {{masked, COUNT(masked)}, {hidden, COUNT(hidden)}, {readonly, COUNT(readonly)}};
  for (unsigned l = 0; l < COUNT(lists); l++)
    for (unsigned i = 0; i < lists[l].n; i++, bit++) {
      snprintf(path, sizeof path, "/proc/%s", lists[l].names[i]);
      if (path_exists(path)) bits |= 1u << bit;
    }
  return bits;
}

int fs_mount(const char *type, const char *const *options, unsigned attributes) {
  int fs = fsopen(type, FSOPEN_CLOEXEC), fd = -1, bad = fs < 0;
  for (; !bad && *options; options += 2)
    bad = options[1] ? fsconfig(fs, FSCONFIG_SET_STRING, options[0], options[1], 0) : fsconfig(fs, FSCONFIG_SET_FLAG, options[0], NULL, 0);
  if (!bad && !fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) fd = fsmount(fs, FSMOUNT_CLOEXEC, attributes);
  int err = errno;
  close_fd(&fs);
  errno = err;
  return fd;
}

// The last part of the path is not followed: where a layer has a symbolic link there, this fails.
int attach(int mount, const char *path) { return move_mount(mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH); }

static int fail(int status, const struct fault *f) {
  ssize_t n = write(status, f, sizeof *f);
  _exit(n == sizeof *f ? 1 : 2);
}

// Whose fault a refusal is: the layers', when what we mount on is not a directory there.
static int place(const char *path, struct fault *f) {
  return errno == ENOTDIR || errno == ENOENT || errno == ELOOP || errno == EINVAL
           ? fault_set(f, "layer_invalid", errno, "%s in the layers is not a directory", path)
           : fault_lack(f, "mounts", errno, "mount %s", path);
}

// A private copy of a mount, with the ids of the sandbox.
static int own_copy(const char *path, const struct sandbox *s, struct fault *f) {
  int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
  struct mount_attr a = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)(unsigned)s->userns_fd};
  if (fd >= 0 && s->userns_fd >= 0 && mount_setattr(fd, "", AT_EMPTY_PATH, &a, sizeof a)) close_fd(&fd);
  return fd < 0 ? fault_lack(f, "mounts", errno, "map the ids of %s", path) : fd;
}

static int lowers(const struct sandbox *s, struct fault *f) {
  char path[256], name[16];
  for (int i = 0; i < s->spec.nlayers; i++) {
    snprintf(path, sizeof path, NODE_LAYERS "/%s", s->spec.layers[i]);
    snprintf(name, sizeof name, "l%d", i);
    int fd = own_copy(path, s, f);
    if (fd < 0) return -1;
    int bad = attach(fd, name) ? errno : 0;
    close(fd);
    if (bad) return fault_lack(f, "mounts", bad, "attach layer %s", s->spec.layers[i]);
  }
  return 0;
}

static int chown_root(const struct sandbox *s, const char *path) { return chown(path, s->spec.uid_base, s->spec.uid_base); }

// The upper directory of the memory medium: a tmpfs of this sandbox, mounted by a process in its memory cgroup.
static int memory_upper(const struct sandbox *s, struct fault *f) {
  char size[32];
  snprintf(size, sizeof size, "%llu", (unsigned long long)s->spec.disk_bytes);
  const char *const options[] = {"source", "upper", "size", s->spec.disk_bytes ? size : "50%", "mode", "0755", NULL};
  int fd = fs_mount("tmpfs", options, MOUNT_ATTR_NODEV);
  if (fd < 0 || attach(fd, "m") || fchdir(fd)) return fault_host(f, errno, "mount the memory medium of %s", s->spec.id);
  return fd;
}

int hosts_text(const struct sandbox *s, char *text, size_t cap) {
  return snprintf(text, cap, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t%.64s\n", s->spec.hostname);
}

static int etc_files(const struct sandbox *s, struct fault *f) {
  char host[512];
  const char *const names[] = {"u/etc/hostname", "u/etc/hosts"}, *texts[] = {host, host};
  for (unsigned i = 0; i < COUNT(names); i++) {
    int n = i ? hosts_text(s, host, sizeof host) : snprintf(host, sizeof host, "%.64s\n", s->spec.hostname);
    int fd = open(names[i], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    int bad = fd < 0 || write(fd, texts[i], (size_t)n) != n || fchown(fd, s->spec.uid_base, s->spec.uid_base);
    close_fd(&fd);
    if (bad) return fault_host(f, errno, "write %s", names[i] + 1);
  }
  return 0;
}

// What a copy of another sandbox's layer may not share with it: its name, and who it is to programs that ask the machine. Its /etc is an
// agent's work, so nothing in it is followed.
int own_identity(const struct sandbox *s, struct fault *f) {
  char text[512];
  int etc = open("u/etc", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (etc < 0) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : fault_host(f, errno, "open /etc of %s", s->spec.id);
  const char *const names[] = {"hostname", "hosts", "machine-id"};
  int bad = 0;
  for (unsigned i = 0; !bad && i < COUNT(names); i++) {
    struct stat st;
    uint8_t random[16];
    int there = !fstatat(etc, names[i], &st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st.st_mode);
    if (!there) continue;              // it never had one, or has its own idea of it
    int n = i == 0 ? snprintf(text, sizeof text, "%.64s\n", s->spec.hostname) : i == 1 ? hosts_text(s, text, sizeof text) : 33;
    if (i == 2) {
      bad = getrandom(random, sizeof random, 0) != sizeof random;
      for (size_t k = 0; k < sizeof random; k++) snprintf(text + 2 * k, 4, "%02x\n", random[k]);
    }
    // a new file: a link to the old one elsewhere keeps the old text
    int fd = bad || unlinkat(etc, names[i], 0) ? -1 : openat(etc, names[i], O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    bad = fd < 0 || write(fd, text, (size_t)n) != n || fchown(fd, s->spec.uid_base, s->spec.uid_base);
    if (bad) fault_host(f, errno, "write /etc/%s of %s", names[i], s->spec.id);
    close_fd(&fd);
  }
  close(etc);
  return bad ? -1 : 0;
}

// The work directory of the other overlay cannot be used again.
static int copied(const struct sandbox *s, struct fault *f) {
  char old[96];
  snprintf(old, sizeof old, "w.%s", s->spec.id);
  if (rename("w", old) || mkdir("w", 0700) || chown_root(s, "w")) return fault_host(f, errno, "prepare the copied layer of %s", s->spec.id);
  return own_identity(s, f);
}

// The overlay that it was the upper of is gone, and what that left in its work directory is of no use to the next one.
static int again(const struct sandbox *s, struct fault *f) {
  return remove_all(AT_FDCWD, "w") || mkdir("w", 0700) || chown_root(s, "w") ? fault_host(f, errno, "prepare the layer of %s again", s->spec.id) : 0;
}

// u and w in the current directory. The upper root takes mode and owner of the lower root, and so does /etc, which gets two files.
static int upper(const struct sandbox *s, struct fault *f) {
  char path[256];
  struct stat st;
  uint32_t base = s->spec.uid_base;
  if (mkdir("u", 0755) || mkdir("w", 0700)) return fault_host(f, errno, "make the upper directories of %s", s->spec.id);
  snprintf(path, sizeof path, NODE_LAYERS "/%s", s->spec.layers[0]);
  if (stat(path, &st) || chown("u", base + st.st_uid, base + st.st_gid) || chmod("u", st.st_mode & 07777) || chown_root(s, "w"))
    return fault_host(f, errno, "prepare the upper directory of %s", s->spec.id);
  st = (struct stat){.st_mode = S_IFDIR | 0755};
  for (int i = 0; i < s->spec.nlayers; i++) {
    struct stat have;
    snprintf(path, sizeof path, NODE_LAYERS "/%s/etc", s->spec.layers[i]);
    if (lstat(path, &have)) continue;
    if (!S_ISCHR(have.st_mode)) st = have;               // a whiteout: there is none below either
    break;
  }
  if (!S_ISDIR(st.st_mode)) return 0;  // /etc is a link or worse: the layers have their own idea of it
  if (mkdir("u/etc", 0755) || chown("u/etc", base + st.st_uid, base + st.st_gid) || chmod("u/etc", st.st_mode & 07777))
    return fault_host(f, errno, "prepare /etc of %s", s->spec.id);
  return etc_files(s, f);
}

// Names are relative so that /proc/mounts inside shows nothing of the host.
static int overlay(const struct sandbox *s, struct fault *f) {
  char name[128];
  if (chdir(NODE_SCRATCH)) return fault_host(f, errno, "enter " NODE_SCRATCH);
  if (lowers(s, f)) return -1;
  int memory = -1;
  if (s->spec.medium == MEDIUM_MEMORY) {
    if ((memory = memory_upper(s, f)) < 0) return -1;
  } else {                             // by path: an upper directory has to be in this mount namespace, and descriptors are of aether's
    snprintf(name, sizeof name, NODE_MEDIUM "/%s", s->spec.id);
    if (chdir(name)) return fault_host(f, errno, "enter the writable layer of %s", s->spec.id);
  }
  if (s->spec.turn ? again(s, f) : s->spec.volume ? copied(s, f) : upper(s, f)) return -1;
  int fs = fsopen("overlay", FSOPEN_CLOEXEC);
  int bad = fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "source", "overlay", 0) || fsconfig(fs, FSCONFIG_SET_STRING, "upperdir", "u", 0) ||
            fsconfig(fs, FSCONFIG_SET_STRING, "workdir", "w", 0) || fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0) || chdir(NODE_SCRATCH);
  for (int i = 0; !bad && i < s->spec.nlayers; i++) {
    snprintf(name, sizeof name, "l%d", i);
    bad = fsconfig(fs, FSCONFIG_SET_STRING, "lowerdir+", name, 0);
  }
  int fd = bad || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) ? -1 : fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV);
  if (fd < 0 || attach(fd, "m")) return fault_host(f, errno, "stack the %d layers of %s", s->spec.nlayers, s->spec.id);
  close(fd);
  close(fs);
  close_fd(&memory);
  // through the path: it crosses into the overlay that is now on top of m
  if (chdir(NODE_SCRATCH "/m") || sys_pivot_root(".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
    return fault_host(f, errno, "enter the root of %s", s->spec.id);
  return 0;
}

static int directory(const struct sandbox *s, const char *path, mode_t mode, struct fault *f) {
  if (mkdir(path, mode)) return errno == EEXIST ? 0 : fault_host(f, errno, "make %s", path);
  return chmod(path, mode) || chown_root(s, path) ? fault_host(f, errno, "make %s", path) : 0;
}

static int proc(const struct sandbox *s, struct fault *f) {
  char path[64];
  unsigned bit = 0;
  const char *const named[] = {"source", "proc", NULL};
  if (directory(s, "/proc", 0555, f)) return -1;
  int fd = fs_mount("proc", named, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
  if (fd < 0) return fault_host(f, errno, "mount proc");
  int bad = attach(fd, "/proc");
  close(fd);
  if (bad) return place("/proc", f);
  for (unsigned i = 0; i < COUNT(masked); i++, bit++) {
    snprintf(path, sizeof path, "/proc/%s", masked[i]);
    if (node.masks >> bit & 1 && mount("/dev/null", path, NULL, MS_BIND, NULL)) return fault_lack(f, "mounts", errno, "mask %s", path);
  }
  for (unsigned i = 0; i < COUNT(hidden); i++, bit++) {
    snprintf(path, sizeof path, "/proc/%s", hidden[i]);
    if (node.masks >> bit & 1 && mount("/dev/mqueue", path, NULL, MS_BIND, NULL)) return fault_lack(f, "mounts", errno, "mask %s", path);
  }
  for (unsigned i = 0; i < COUNT(readonly); i++, bit++) {
    snprintf(path, sizeof path, "/proc/%s", readonly[i]);
    if (node.masks >> bit & 1 &&
        (mount(path, path, NULL, MS_BIND, NULL) ||
         mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)))
      return fault_lack(f, "mounts", errno, "make %s read-only", path);
  }
  return 0;
}

static int terminals(const struct sandbox *s, struct fault *f) {
  char gid[16];
  snprintf(gid, sizeof gid, "%u", s->spec.uid_base + 5);
  const char *const options[] = {"source", "devpts", "newinstance", NULL, "ptmxmode", "0666", "mode", "0620", "gid", gid, "max", TERMINALS, NULL};
  int fd = fs_mount("devpts", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
  if (fd < 0) return fault_host(f, errno, "make the terminals of %s", s->spec.id);
  int bad = attach(fd, "/dev/pts");
  close(fd);
  return bad ? place("/dev/pts", f) : 0;
}

static int devices(const struct setup *u, struct fault *f) {
  const struct sandbox *s = u->s;
  char size[32], base[16];
  if (directory(s, "/dev", 0755, f)) return -1;
  if (attach(u->dev, "/dev")) return place("/dev", f);
  if (terminals(s, f)) return -1;
  snprintf(size, sizeof size, "%llu", (unsigned long long)s->spec.shm_bytes);
  snprintf(base, sizeof base, "%u", s->spec.uid_base);
  const char *const options[] = {"source", "shm", "size", size, "mode", "1777", "uid", base, "gid", base, NULL};
  int fd = fs_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
  if (fd < 0) return fault_host(f, errno, "mount /dev/shm");
  int bad = attach(fd, "/dev/shm");
  close(fd);
  return bad ? place("/dev/shm", f) : 0;
}

// What aether makes while this one mounts.
static int join(const struct setup *u, struct fault *f) {
  char byte;
  if (read(u->go, &byte, 1) != 1) _exit(2);              // aether failed or died; nobody waits for an answer
  if (cgroup_join(&u->s->spec, f) || class_take(&u->s->spec, f)) return -1;
  if (unshare(CLONE_NEWCGROUP)) return fault_lack(f, "namespaces", errno, "make a cgroup namespace");
  return setns(u->aether, CLONE_NEWNET) ? fault_host(f, errno, "join the network namespace") : 0;
}

static int give_up(const struct setup *u, struct fault *f) {
  const struct sandbox *s = u->s;
  const struct account nobody = {.name = "root"};
  if (s->userns_fd >= 0 && !s->spec.own_pids && setns(s->userns_fd, CLONE_NEWUSER)) return fault_host(f, errno, "enter the user namespace");
  if (privilege_cut(&nobody, KEEP_NONE, f)) return -1;
  // after the last change of credentials, which would clear it: PID 1, and with it everything inside, dies with aether
  if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) || prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)) return fault_set(f, "internal", errno, "bind PID 1 to its supervisor");
  return 0;
}

static void __attribute__((noreturn)) become_init(const struct setup *u, struct fault *f) {
  static char *const argv[] = {(char *)"init", NULL}, *const env[] = {NULL};
  if (give_up(u, f)) fail(u->status, f);
  // was aether gone before the death signal was set, nobody reads this pipe any more
  if (write(u->status, f, sizeof *f) != sizeof *f) _exit(2);
  if (close_range(0, ~0u, CLOSE_RANGE_CLOEXEC) || filter_load(&init_filter)) {
    fault_set(f, "internal", errno, "load the filter of PID 1");
    fail(u->status, f);
  }
  execveat(node.init_fd, "", argv, env, AT_EMPTY_PATH);
  fault_set(f, "internal", errno, "start PID 1");
  fail(u->status, f);
  __builtin_unreachable();
}

// A pid namespace that the sandbox's user namespace owns, in which a process without any right on the host may choose pids (restore.c). PID 1
// has to be born by somebody who is in the user namespace already, and /proc be mounted by somebody who is not. All are aether's children.
static int own_pids(struct setup *u, struct fault *f) {
  int go[2];
  char byte;
  if (pipe2(go, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  struct clone_args a = {.flags = CLONE_PARENT | CLONE_VFORK};
  pid_t helper = sys_clone3(&a);
  if (!helper) {
    struct clone_args one = {.flags = CLONE_PARENT};
    int bad = setns(u->s->userns_fd, CLONE_NEWUSER) || unshare(CLONE_NEWPID);
    pid_t init = bad ? -1 : sys_clone3(&one);
    if (!init) {
      close(go[1]);
      if (read(go[0], &byte, 1) != 1) _exit(2);
      become_init(u, f);
    }
    if (init > 0) u->own->init = init;
    else u->own->err = errno;
    _exit(0);
  }
  int err = helper < 0 ? errno : u->own->err;
  if (helper > 0) u->own->helper = helper;
  int pidfd = u->own->init > 0 ? sys_pidfd_open(u->own->init) : -1;
  if (pidfd >= 0 && setns(pidfd, CLONE_NEWPID)) { err = errno; close_fd(&pidfd); }
  if (pidfd < 0) return fault_host(f, err ? err : errno, "make the pid namespace of %s", u->s->spec.id);
  close(pidfd);
  close(go[0]);
  pid_t mounter = fork();              // /proc shows the pid namespace of whoever mounts it
  if (!mounter) {
    if (proc(u->s, f)) fail(u->status, f);
    _exit(0);
  }
  int status = 0;
  if (mounter < 0) return fault_host(f, errno, "start a process in %s", u->s->spec.id);
  while (waitpid(mounter, &status, 0) < 0 && errno == EINTR) {}
  if (status) _exit(2);                // it has said why
  return write(go[1], "", 1) == 1 ? 0 : fault_set(f, "internal", errno, "PID 1 of %s died while it was made", u->s->spec.id);
}

void setup_child(struct setup *u) {
  struct sandbox *s = u->s;
  struct fault f = {0};
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  umask(0);
  if ((u->dev = own_copy(NODE_DEV, s, &f)) < 0 || overlay(s, &f) || devices(u, &f) || given_mount(s, &f) || (!s->spec.own_pids && proc(s, &f)) ||
      directory(s, "/tmp", 01777, &f) || join(u, &f))
    fail(u->status, &f);
  if (sethostname(s->spec.hostname, strlen(s->spec.hostname))) { fault_host(&f, errno, "set the host name"); fail(u->status, &f); }
  if (s->spec.own_pids && own_pids(u, &f)) fail(u->status, &f);
  // aether looks at the new root now, while this goes on
  if (write(u->status, &f, sizeof f) != sizeof f) _exit(2);
  if (s->spec.own_pids) _exit(0);
  become_init(u, &f);
}

int netns_make(struct fault *f) {
  struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
  if (unshare(CLONE_NEWNET)) return fault_lack(f, "namespaces", errno, "make a network namespace");
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  int bad = s < 0 || ioctl(s, SIOCSIFFLAGS, &lo);
  int err = errno;
  close_fd(&s);
  if (bad) return fault_host(f, err, "bring the loopback interface up");
  // the namespace is the host's, so root inside has no say in it: let everyone bind low ports and send pings
  if (write_at(AT_FDCWD, "/proc/sys/net/ipv4/ip_unprivileged_port_start", "0") ||
      write_at(AT_FDCWD, "/proc/sys/net/ipv4/ping_group_range", "0 2147483647"))
    return fault_host(f, errno, "open the low ports of the network namespace");
  return 0;
}
