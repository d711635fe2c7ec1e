// The floor: what the kernel needs for one container of ours, and nothing else. No protocol, journal, supervisor, log or look-up.
//
// For each: cgroups with limits, a writable layer with a quota, user and network namespace, one clone3 with the others, idmapped layers,
// overlay, /dev, /proc with masks, pivot_root, capabilities and seccomp dropped, exec of /bin/true, reap, removal of all of it.
//
// floor -n TOTAL -c PARALLEL -g CGROUP -f FILTER [-m BTRFS] [-k] -l IMAGE [-l IMAGE ...]  (IMAGE: EROFS, base first; no -m: tmpfs)
// -k: without the user namespace, the loop by which machines are compared (quiet: 1.4 ms on tmpfs).
// Prints one line of JSON: n, parallel, seconds, rate (a second), p50_ms, p99_ms.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "arena.h"

static struct sock_fprog filter;
static int plain;                      // -k
static const char *const masked[] = {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kpagecount", "/proc/kpagecgroup", "/proc/kpageflags",
                                     "/proc/sysrq-trigger", "/proc/kallsyms", "/proc/config.gz", "/proc/interrupts", "/proc/kmsg",
                                     "/proc/slabinfo", "/proc/vmallocinfo"};
static const char *const hidden[] = {"/proc/scsi", "/proc/acpi", "/proc/asound"};
static const char *const readonly[] = {"/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq"};

static void loopback(void) {
  struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (s < 0 || ioctl(s, SIOCSIFFLAGS, &lo)) die("bring loopback up");
  close(s);
}

static void enter_root(int worker, int i, int layer, int userns, int dev) {
  static const char *const pts[] = {"newinstance", NULL, "ptmxmode", "0666", NULL}, *const shm[] = {"size", "67108864", "mode", "1777", NULL};
  char target[32];
  snprintf(target, sizeof target, "/w%d/m", worker);
  lowers_mount(worker, userns);
  overlay_mount(worker, i, layer, target);
  if (chdir(target) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) die("enter the root");
  attach(dev, "/dev");
  attach(detached("devpts", pts, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), "/dev/pts");
  attach(detached("tmpfs", shm, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC), "/dev/shm");
  attach(detached("proc", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC), "/proc");
  for (unsigned i = 0; i < sizeof masked / sizeof *masked; i++)
    if (mount("/dev/null", masked[i], NULL, MS_BIND, NULL) && errno != ENOENT) die("mask %s", masked[i]);
  for (unsigned i = 0; i < sizeof hidden / sizeof *hidden; i++)
    if (mount("/dev/empty", hidden[i], NULL, MS_BIND, NULL) && errno != ENOENT) die("mask %s", hidden[i]);
  for (unsigned i = 0; i < sizeof readonly / sizeof *readonly; i++) {
    if (mount(readonly[i], readonly[i], NULL, MS_BIND, NULL)) { if (errno == ENOENT) continue; die("bind %s", readonly[i]); }
    if (mount(NULL, readonly[i], NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) die("protect %s", readonly[i]);
  }
}

static void give_up(int userns) {
  const unsigned long keep = 1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER | 1u << CAP_FSETID | 1u << CAP_KILL | 1u << CAP_SETGID |
                             1u << CAP_SETUID | 1u << CAP_SETPCAP | 1u << CAP_NET_BIND_SERVICE | 1u << CAP_SYS_CHROOT | 1u << CAP_AUDIT_WRITE |
                             1u << CAP_SETFCAP;
  if (userns >= 0 && setns(userns, CLONE_NEWUSER)) die("enter the user namespace");
  for (unsigned c = 0; c < 64; c++)
    if (!(c < 32 && keep >> c & 1) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0)) {
      if (errno == EINVAL) break;
      die("drop capability %u", c);
    }
  struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct d[2] = {{(uint32_t)keep, (uint32_t)keep, 0}, {0, 0, 0}};
  if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0) || syscall(SYS_capset, &h, d)) die("cut the privileges");
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter)) die("load the filter");
}

static void one(int worker, int i) {
  static char *const argv[] = {(char *)"/bin/true", NULL}, *const env[] = {NULL};
  int group = groups_make(worker, i), layer = layer_make(worker, i), userns = plain ? -1 : userns_make(), pidfd, status;
  struct clone_args a = {.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_PIDFD | CLONE_INTO_CGROUP,
                         .pidfd = (uint64_t)(uintptr_t)&pidfd, .exit_signal = SIGCHLD, .cgroup = (uint64_t)(unsigned)group};
  pid_t pid = (pid_t)syscall(SYS_clone3, &a, sizeof a);
  if (pid < 0) die("clone3");
  if (!pid) {
    groups_join(worker, i);
    if (unshare(CLONE_NEWCGROUP)) die("make a cgroup namespace");
    loopback();
    enter_root(worker, i, layer, userns, mapped_copy("/dev", userns));
    if (sethostname("sandbox", 7)) die("set the host name");
    give_up(userns);
    execve(argv[0], argv, env);
    die("run %s", argv[0]);
  }
  if (waitpid(pid, &status, 0) != pid || status) { fprintf(stderr, "container %d-%d ended with status %x\n", worker, i, status); exit(1); }
  close(pidfd);
  close(group);
  if (userns >= 0) close(userns);
  if (layer >= 0) close(layer);
  layer_remove(worker, i);
  groups_remove(worker, i);
}

static void read_filter(const char *path) {
  struct stat st;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &st)) die("open %s", path);
  filter.filter = malloc((size_t)st.st_size);
  filter.len = (unsigned short)((size_t)st.st_size / sizeof(struct sock_filter));
  if (!filter.filter || read(fd, filter.filter, (size_t)st.st_size) != st.st_size) die("read %s", path);
  close(fd);
}

int main(int argc, char **argv) {
  int total = 100, parallel = 1, o;
  while ((o = getopt(argc, argv, "n:c:g:f:m:l:k")) > 0) switch (o) {
    case 'n': total = atoi(optarg); break;
    case 'c': parallel = atoi(optarg); break;
    case 'g': arena.cgroup = optarg; break;
    case 'f': read_filter(optarg); break;
    case 'k': plain = 1; break;
    case 'm': arena.medium = optarg; break;
    case 'l': if (arena.nlowers < MAX_LOWERS) arena.images[arena.nlowers++] = optarg; break;
    default: return 2;
  }
  if (!arena.cgroup || !arena.nlowers || !filter.len || total < 1 || parallel < 1) { fprintf(stderr, "see the head of floor.c\n"); return 2; }
  arena_enter(1, 0, parallel);
  umask(0);
  arena_run(total, parallel, one);
  return 0;
}
