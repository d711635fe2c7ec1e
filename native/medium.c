// The writable medium: one btrfs in a preallocated file on a loop device with direct I/O, one subvolume with a quota a sandbox.
// A sandbox over its quota sees EDQUOT ("Disk quota exceeded"), which btrfs gives where other file systems give ENOSPC.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/fs.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define QUOTA_SIMPLE 4                 // accounts by extent owner: no backref walks (Linux 6.7)
#define SLACK (1u << 20)               // a layer that cannot take this much more counts as full
#define OPTIONS "nodatacow,nodiscard"  // nothing here outlives a crash; a discard would give the reserved blocks back to the host

static int vol(int dir, unsigned long request, const char *name) {
  struct btrfs_ioctl_vol_args a = {0};
  if (strlen(name) > BTRFS_PATH_NAME_MAX) { errno = ENAMETOOLONG; return -1; }
  memcpy(a.name, name, strlen(name));
  return ioctl(dir, request, &a);
}

static int run_mkfs(const char *program, const char *path, struct fault *f) {
  int out[2];
  char text[512] = "";
  if (!program) program = "mkfs.btrfs";
  if (pipe2(out, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  signal(SIGCHLD, SIG_DFL);            // its status is wanted
  pid_t pid = fork();
  if (!pid) {
    if (setns(node.host_ns, CLONE_NEWNS)) _exit(126);
    dup2(out[1], 1);
    dup2(out[1], 2);
    execlp(program, program, "-q", "-f", "-K", "-m", "single", "-d", "single", path, (char *)NULL);
    _exit(127);
  }
  close(out[1]);
  size_t used = 0;
  for (ssize_t n; pid > 0 && (n = read(out[0], text + used, sizeof text - 1 - used)) > 0;) used += (size_t)n;
  close(out[0]);
  int status = -1;
  if (pid > 0) waitpid(pid, &status, 0);
  signal(SIGCHLD, SIG_IGN);
  if (!status) return 0;
  if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 127) return fault_set(f, "internal", 0, "%s is not there (package btrfs-progs)", program);
  text[strcspn(text, "\n")] = 0;
  return fault_set(f, "internal", 0, "%s %s failed: %.90s", program, path, text);
}

// An open file of the wanted size with a file system in it. `fresh`: make that even if there is one.
static int image(const char *path, uint64_t bytes, const char *mkfs, int fresh, struct fault *f) {
  struct stat st;
  int file = host_open(path, O_RDWR);
  int have = file >= 0 && !fstat(file, &st) && (uint64_t)st.st_size == bytes;
  if (have && !fresh) return file;
  if (!have) {
    close_fd(&file);
    if (setns(node.host_ns, CLONE_NEWNS)) return fault_host(f, errno, "visit the host's mounts");
    unlink(path);
    if (setns(node.own_ns, CLONE_NEWNS)) _exit(70);
    if ((file = host_open(path, O_RDWR | O_CREAT)) < 0) return fault_host(f, errno, "make the medium %s", path);
    int flags = FS_NOCOW_FL;           // where the host's own file system is btrfs; refused elsewhere
    (void)ioctl(file, FS_IOC_SETFLAGS, &flags);
    if (fallocate(file, 0, 0, (off_t)bytes)) {
      int err = errno;
      if (!ftruncate(file, 0)) close_fd(&file);
      return fault_host(f, err, "reserve %llu MiB for the medium (node.medium_size_mb) %s", (unsigned long long)(bytes >> 20), path);
    }
  }
  if (run_mkfs(mkfs, path, f)) close_fd(&file);
  return file;
}

static int mount_image(int file, struct fault *f) {
  char dev[64];
  int loop = loop_attach(file, 0, 1, dev, sizeof dev, f);
  if (loop < 0) return -1;
  int bad = mount(dev, NODE_MEDIUM, "btrfs", MS_NOATIME | MS_NODEV | MS_NOSUID, OPTIONS), err = errno;
  close(loop);                         // the mount holds the device
  errno = err;
  return bad;
}

static int quota_directory(void) {
  struct btrfs_ioctl_fs_info_args info = {0};
  char path[128];
  if (ioctl(node.medium, BTRFS_IOC_FS_INFO, &info)) return -1;
  int n = snprintf(path, sizeof path, "/sys/fs/btrfs/");
  for (int i = 0; i < 16; i++)
    n += snprintf(path + n, sizeof path - (size_t)n, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", info.fsid[i]);
  snprintf(path + n, sizeof path - (size_t)n, "/qgroups");
  return host_open(path, O_RDONLY | O_DIRECTORY);
}

int medium_open(void) {
  struct statx st;
  if (statx(AT_FDCWD, NODE_MEDIUM, 0, 0, &st) || !(st.stx_attributes & STATX_ATTR_MOUNT_ROOT)) return -1;
  node.medium = open(NODE_MEDIUM, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (node.medium < 0) return -1;
  node.qgroups = quota_directory();
  return 0;
}

// What is neither kept nor, unless all is to go, a sandbox's own.
static int by_name(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static int wipe(const char **keep, int nkeep, int all, struct fault *f) {
  int copy = openat(node.medium, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  if (!d) { close_fd(&copy); return fault_host(f, errno, "list the medium"); }
  int bad = 0;
  qsort(keep, (size_t)nkeep, sizeof *keep, by_name);
  for (struct dirent *e; !bad && (e = readdir(d));) {
    const char *name = e->d_name;
    int kept = *name == '.' || (!all && !snapshot_named(name)) || bsearch(&name, keep, (size_t)nkeep, sizeof *keep, by_name);
    if (!kept && medium_remove(e->d_name)) bad = fault_host(f, errno, "remove the stale volume %s from the medium", e->d_name);
  }
  closedir(d);
  return bad;
}

int medium_keep(const char **keep, int nkeep, struct fault *f) { return wipe(keep, nkeep, 0, f); }

int medium_mount(const char *path, uint64_t bytes, const char *mkfs, const char **keep, int nkeep, struct fault *f) {
  char loop[32];
  if (node.medium >= 0) return medium_keep(keep, nkeep, f); // joined: sandboxes live on it, and whoever took snapshots is gone
  if (!path || *path != '/' || bytes < (256u << 20)) return fault_set(f, "invalid_request", 0, "the medium needs an absolute path and at least 256 MiB");
  int file = host_open(path, O_RDWR);
  // two loop devices over one file would be two file systems that do not know each other; one that is going away is waited for
  for (int i = 0; file >= 0 && loop_find(file, loop, sizeof loop); i++) {
    if (i == 50) { close(file); return fault_set(f, "internal", 0, "the medium %s is in use by %s: another node runs on this state", path, loop); }
    nap_us(100000);
  }
  close_fd(&file);
  if ((file = image(path, bytes, mkfs, 0, f)) < 0) return -1;
  if (mount_image(file, f)) {          // not a file system, or one that was cut short
    close_fd(&file);
    if (f->code || (file = image(path, bytes, mkfs, 1, f)) < 0) return -1;
    if (mount_image(file, f)) {
      int err = errno;
      close_fd(&file);
      return fault_host(f, err, "mount the medium %s", path);
    }
  }
  close(file);
  if (medium_open()) return fault_host(f, errno, "open the medium");
  struct btrfs_ioctl_quota_ctl_args q = {.cmd = QUOTA_SIMPLE};
  if (ioctl(node.medium, BTRFS_IOC_QUOTA_CTL, &q) && errno != EEXIST) {
    q.cmd = BTRFS_QUOTA_CTL_ENABLE;
    if (ioctl(node.medium, BTRFS_IOC_QUOTA_CTL, &q) && errno != EEXIST) {
      int err = errno;
      close_fd(&node.medium);
      umount2(NODE_MEDIUM, MNT_DETACH);
      return fault_host(f, err, "enable quotas on the medium %s", path);
    }
  }
  close_fd(&node.qgroups);
  node.qgroups = quota_directory();
  return wipe(keep, nkeep, 1, f);
}

static int medium_copy(const char *from, const char *to, struct fault *f) {
  struct btrfs_ioctl_vol_args_v2 a = {.fd = openat(node.medium, from, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
  if (a.fd < 0) return errno == ENOENT ? fault_set(f, "snapshot_not_found", 0, "there is no snapshot %s", from) : fault_host(f, errno, "open the snapshot %s", from);
  memcpy(a.name, to, strlen(to));
  int bad = ioctl(node.medium, BTRFS_IOC_SNAP_CREATE_V2, &a), err = errno;
  close((int)a.fd);
  return bad ? fault_host(f, err, "make the writable layer of %s from %s", to, from) : 0;
}

static int there(const char *name) {
  struct stat st;
  return !fstatat(node.medium, name, &st, AT_SYMLINK_NOFOLLOW);
}

static const char *beside(char name[96], const char *id, const char *suffix) {
  snprintf(name, 96, "%.64s.%s", id, suffix);
  return name;
}

int medium_put(const struct spec *c, struct fault *f) {
  char next[96], path[160];
  if (node.medium < 0) return fault_set(f, "internal", 0, "the node's writable medium is not mounted");
  if (medium_remove(beside(next, c->id, "next"))) return fault_host(f, errno, "remove the volume %s", next);
  if (medium_copy(c->volume, next, f)) return -1;
  if (!c->hostname) return 0;
  // another sandbox's files: their identity is not to be this one's
  struct sandbox s = {.spec = *c};
  snprintf(path, sizeof path, NODE_MEDIUM "/%s", next);
  if (!chdir(path) && !own_identity(&s, f)) return 0;
  fault_host(f, errno, "enter the volume %s", next);
  medium_remove(next);
  return -1;
}

// The layer that the sandbox had, or the one that was put beside it to take its place. Whoever did a step before may have died over the next.
static int take_up(const char *id, struct fault *f) {
  char next[96], old[96];
  if (there(beside(next, id, "next"))) {
    if (there(id) && (medium_remove(beside(old, id, "old")) || renameat(node.medium, id, node.medium, old)))
      return fault_host(f, errno, "put the writable layer of %s aside", id);
    if (renameat(node.medium, next, node.medium, id)) return fault_host(f, errno, "exchange the writable layer of %s", id);
  }
  return there(id) ? 0 : fault_set(f, "volume_not_found", 0, "the writable layer of %s is not on the medium any more", id);
}

int medium_take(struct sandbox *s, struct fault *f) {
  const char *id = s->spec.id;
  struct box *b = s->box;
  if ((b->volume = openat(node.medium, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) return fault_host(f, errno, "open the writable layer of %s", id);
  struct btrfs_ioctl_ino_lookup_args where = {.objectid = BTRFS_FIRST_FREE_OBJECTID};
  if (ioctl(b->volume, BTRFS_IOC_INO_LOOKUP, &where)) return fault_host(f, errno, "find the writable layer of %s", id);
  snprintf(b->qgroup, sizeof b->qgroup, "0_%llu", (unsigned long long)where.treeid);
  if (!s->spec.disk_bytes) return 0;
  struct btrfs_ioctl_qgroup_limit_args l = {.qgroupid = where.treeid, .lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = s->spec.disk_bytes}};
  return ioctl(b->volume, BTRFS_IOC_QGROUP_LIMIT, &l) ? fault_host(f, errno, "limit the writable layer of %s", id) : 0;
}

int medium_make(struct sandbox *s, struct fault *f) {
  const char *id = s->spec.id;
  if (node.medium < 0) return fault_set(f, "internal", 0, "the node's writable medium is not mounted");
  if (s->spec.turn ? take_up(id, f) : s->spec.volume ? medium_copy(s->spec.volume, id, f) : vol(node.medium, BTRFS_IOC_SUBVOL_CREATE, id) ? fault_host(f, errno, "make the writable layer of %s", id) : 0)
    return -1;
  return medium_take(s, f);
}

int medium_remove(const char *id) {
  struct btrfs_ioctl_ino_lookup_args where = {.objectid = BTRFS_FIRST_FREE_OBJECTID};
  if (node.medium < 0) return 0;
  int dir = openat(node.medium, id, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (dir < 0) return errno == ENOENT ? 0 : -1;
  int known = !ioctl(dir, BTRFS_IOC_INO_LOOKUP, &where);
  close(dir);
  if (vol(node.medium, BTRFS_IOC_SNAP_DESTROY, id)) return errno == ENOENT ? 0 : -1;
  // the group can go only when the last extent has; newer kernels then drop it themselves, so a refusal here is no loss
  struct btrfs_ioctl_qgroup_create_args q = {.create = 0, .qgroupid = where.treeid};
  if (known) (void)ioctl(node.medium, BTRFS_IOC_QGROUP_CREATE, &q);
  return 0;
}

int medium_rest(struct sandbox *s) {
  char name[96];
  // of a rollback that came to nothing: the next supervisor must not take it up
  return medium_remove(beside(name, s->spec.id, "next")) || syncfs(s->box->volume) ? -1 : 0;
}

int medium_forget(const char *id) {
  char name[96];
  return medium_remove(beside(name, id, "next")) || medium_remove(beside(name, id, "old")) || medium_remove(id) ? -1 : 0;
}

int medium_snapshot(struct sandbox *s, const char *name, struct fault *f) {
  struct btrfs_ioctl_vol_args_v2 a = {.fd = s->box->volume};
  if (strlen(name) > BTRFS_SUBVOL_NAME_MAX) return fault_set(f, "invalid_request", ENAMETOOLONG, "the name of a snapshot of %s", s->spec.id);
  memcpy(a.name, name, strlen(name));
  return ioctl(node.medium, BTRFS_IOC_SNAP_CREATE_V2, &a) ? fault_host(f, errno, "snapshot the writable layer of %s", s->spec.id) : 0;
}

int snapshot_named(const char *name) {
  size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789.-");
  return !name[n] && n < 64 && (!strncmp(name, "snap-", 5) || (strchr(name, '.') && *name != '.'));
}

static uint64_t quota(const struct box *b, const char *name) {
  char path[96];
  uint64_t v = 0;
  snprintf(path, sizeof path, "%s/%s", b->qgroup, name);
  if (node.qgroups >= 0) read_u64(node.qgroups, path, &v);
  return v;
}

// What is written and what is reserved for data that is still only in memory.
static int over(const struct sandbox *s, uint64_t *used) {
  const struct box *b = s->box;
  *used = quota(b, "referenced") + quota(b, "rsv_data");
  return s->spec.disk_bytes && *used + quota(b, "rsv_meta_pertrans") + quota(b, "rsv_meta_prealloc") + SLACK > s->spec.disk_bytes;
}

void medium_usage(struct sandbox *s, uint64_t *used, int *full) {
  const struct box *b = s->box;
  static uint64_t synced;
  struct timespec now;
  if (b->volume < 0) {                 // memory medium: the overlay reports its tmpfs
    struct statfs st;
    int root = b->root < 0 ? -1 : openat(b->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int bad = root < 0 || fstatfs(root, &st);
    close_fd(&root);
    *used = bad ? 0 : (uint64_t)(st.f_blocks - st.f_bfree) * (uint64_t)st.f_bsize;
    *full = !bad && s->spec.disk_bytes && (uint64_t)st.f_bavail * (uint64_t)st.f_bsize < SLACK;
    return;
  }
  *full = over(s, used);
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (!*full || (uint64_t)now.tv_sec == synced) return;
  // what was freed counts until the next commit, which may be half a minute away: it is made now, at most once a second
  synced = (uint64_t)now.tv_sec;
  if (!ioctl(b->volume, BTRFS_IOC_SYNC)) *full = over(s, used);
}
