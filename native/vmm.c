// See vmm.h. Its own pid, mount, network, ipc and host name namespaces, a root with the system's programs and libraries and no writable
// file, an unprivileged user of its own, no capability and no way to get one. What it works on it inherits as descriptors.
#include "vmm.h"
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "util.h"

#define PID_FD 1                       // where our caller reads its pid

static int fail(const char *what) {
  fprintf(stderr, "vmm: %s: %s\n", what, strerror(errno));
  return 1;
}

static int bind_readonly(const char *from, const char *to) {
  return mount(from, to, NULL, MS_BIND, NULL) || mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) ? -1 : 0;
}

// A directory of the host, or the symbolic link that a merged /usr has in its place.
static int take(const char *path) {
  char to[256];
  struct stat st;
  if (lstat(path, &st)) return errno == ENOENT ? 0 : -1;
  if (S_ISLNK(st.st_mode)) {
    ssize_t n = readlink(path, to, sizeof to - 1);
    if (n < 0) return -1;
    to[n] = 0;
    return symlink(to, path + 1);
  }
  if (S_ISDIR(st.st_mode)) return mkdir(path + 1, 0755) || bind_readonly(path, path + 1) ? -1 : 0;
  int fd = open(path + 1, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return -1;
  close(fd);
  return bind_readonly(path, path + 1);
}

static int device(const char *path) {
  int fd = open(path + 1, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return -1;
  close(fd);
  return mount(path, path + 1, NULL, MS_BIND, NULL);
}

static int own_root(int kvm) {
  static const char *const paths[] = {"/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache"};
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("vmm", "/tmp", "tmpfs", MS_NOSUID, "mode=755,size=1m") || chdir("/tmp")) return -1;
  umask(022);
  if (mkdir("etc", 0755) || mkdir("dev", 0755) || mkdir("proc", 0555)) return -1;
  for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
    if (take(paths[i])) return -1;
  if (device("/dev/null") || device("/dev/urandom") || (kvm && device("/dev/kvm"))) return -1;
  if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return -1;
  if (mount(NULL, "/tmp", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID, NULL)) return -1;
  return sys_pivot_root(".", ".") || umount2(".", MNT_DETACH) || chdir("/") ? -1 : 0;
}

static int give_up(uid_t uid, gid_t kvm) {
  if (setgroups(kvm ? 1 : 0, &kvm) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)) return -1;
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
  return setsid() < 0 ? -1 : 0;
}

int vmm_main(int argc, char **argv) {
  static const struct option options[] = {{"uid", 1, NULL, 'u'}, {"cgroup", 1, NULL, 'c'}, {"kvm", 0, NULL, 'k'}, {0}};
  unsigned long uid = 0;
  const char *group = NULL;
  int kvm = 0;
  optind = 2;
  for (int o; (o = getopt_long(argc, argv, "+", options, NULL)) > 0;) switch (o) {
    case 'u': uid = strtoul(optarg, NULL, 10); break;
    case 'c': group = optarg; break;
    case 'k': kvm = 1; break;
    default: return 2;
  }
  if (uid < 1000 || uid > 0x7ffffffful || !group || optind == argc) {
    fprintf(stderr, "vmm: --uid N (at least 1000), --cgroup DIR and a program are needed\n");
    return 2;
  }
  int dir = open(group, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0 || write_at(dir, "cgroup.procs", "0")) return fail(group);
  struct stat st = {0};
  if (kvm && stat("/dev/kvm", &st)) return fail("/dev/kvm");
  if (unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID)) return fail("make namespaces");
  pid_t pid = fork();                  // PID 1 of its namespace
  if (pid < 0) return fail("fork");
  if (pid) {
    char text[16];
    int n = snprintf(text, sizeof text, "%d\n", pid);
    return write(PID_FD, text, (size_t)n) == n ? 0 : fail("tell the pid");
  }
  int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  signal(SIGCHLD, SIG_DFL);
  if (own_root(kvm)) return fail("make a root");
  if (null < 0 || dup2(null, PID_FD) < 0) return fail("/dev/null");
  if (give_up((uid_t)uid, kvm ? st.st_gid : 0)) return fail("give up rights");
  execv(argv[optind], argv + optind);
  return fail(argv[optind]);
}
