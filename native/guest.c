// The guest that a hand lives in: from the initramfs to a node's root with its layers, and what has to be new in every copy of it.
#include "hand.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/random.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "mux.h"
#include "node.h"
#include "util.h"

#define FIRST_SLOT 16                  // of the PCI bus: layer n is the pmem device in slot 16 + n
#define PORTS "/sys/class/virtio-ports"
#define LATE "/modules/late.ko"        // the disk's driver: what it learns of the disk must not be in a template
#define WAIT_US 2000

static int late = -1;

void guest_die(const char *what, const char *why) {
  fprintf(stderr, "hand: %s: %s\n", what, why);
  reboot(RB_AUTOBOOT);
  for (;;) pause();
}

static void must(int bad, const char *what) { if (bad) guest_die(what, strerror(errno)); }

static void module_load(int fd, const char *name) {
  if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST)) guest_die(name, strerror(errno));
}

static void modules(void) {
  char line[200], path[300];
  FILE *order = fopen("/modules/order", "re");
  must(!order, "/modules/order");
  while (fgets(line, sizeof line, order)) {
    line[strcspn(line, "\n")] = 0;
    snprintf(path, sizeof path, "/modules/%s", line);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    module_load(fd, line);
    close(fd);
    unlink(path);                      // the initramfs is memory
  }
  fclose(order);
  late = open(LATE, O_RDONLY | O_CLOEXEC);
  must(late < 0, LATE);
}

// The initramfs cannot be pivoted away from: a root of our own is stacked over it.
static void own_root(void) {
  static const char *const dirs[] = {"proc", "sys", "dev", "tmp", "run", "state"};
  must(mkdir("/root.new", 0755) || mount("root", "/root.new", "tmpfs", 0, "mode=755,size=4m") || chdir("/root.new"), "make a root");
  for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) must(mkdir(dirs[i], 0755), dirs[i]);
  must(mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"), "enter the root");
  must(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount proc");
  must(mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount sysfs");
  must(mount("dev", "/dev", "devtmpfs", MS_NOSUID, NULL), "mount devtmpfs");
  must(mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount cgroup2");
}

// Which layer a pmem device is: by its place on the bus, since its number is that in which drivers came to it.
static int layer_of(const char *block) {
  char path[300], to[1024];
  snprintf(path, sizeof path, "/sys/block/%.200s", block);
  ssize_t n = readlink(path, to, sizeof to - 1);
  if (n <= 0) return -1;
  to[n] = 0;
  unsigned slot = 0;
  char *at = strstr(to, "0000:00:");
  if (!at || sscanf(at + 8, "%x", &slot) != 1 || slot < FIRST_SLOT) return -1;
  return (int)(slot - FIRST_SLOT);
}

static void layers(void) {
  char dev[300], to[300];
  DIR *d = opendir("/sys/block");
  must(!d, "/sys/block");
  for (struct dirent *e; (e = readdir(d));) {
    int n = strncmp(e->d_name, "pmem", 4) ? -1 : layer_of(e->d_name);
    if (n < 0) continue;
    snprintf(dev, sizeof dev, "/dev/%.200s", e->d_name);
    snprintf(to, sizeof to, NODE_LAYERS "/%d", n);
    must(mkdir(to, 0755), to);
    must(mount(dev, to, "erofs", MS_RDONLY | MS_NODEV, "dax=always"), dev);
  }
  closedir(d);
}

void guest_boot(void) {
  struct fault f = {0};
  char filter[64];
  mkdir("/dev", 0755);
  int program = open("/filter", O_RDONLY);
  must(program < 0, "/filter");
  modules();
  own_root();
  snprintf(filter, sizeof filter, "/proc/self/fd/%d", program);
  node.run = "/run/dsec";
  node.state = "/state/dsec";
  node.cgroup = "dsec";
  node.loader = -1;
  for (int class = 0; class < CPU_CLASSES; class++) node.core[class].fd = -1;
  if (node_programs(filter, &f) || root_make(&f)) guest_die("boot", f.message);
  // the container's limit says what it may have, as on a host with much more memory
  must(write_at(AT_FDCWD, "/proc/sys/vm/overcommit_memory", "1"), "overcommit");
  close(program);
  node.masks = masks_present();
  must(mkdir("/sys", 0755) || mkdir("/dev", 0755), "make directories");
  must(mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) || mount("dev", "/dev", "devtmpfs", MS_NOSUID, NULL), "mount");
  layers();
}

int guest_port(void) {
  char path[300], name[64];
  DIR *d = opendir(PORTS);
  must(!d, PORTS);
  for (struct dirent *e; (e = readdir(d));) {
    snprintf(path, sizeof path, PORTS "/%.100s/name", e->d_name);
    if (*e->d_name == '.' || read_at(AT_FDCWD, path, name, sizeof name) < 0) continue;
    name[strcspn(name, "\n")] = 0;
    if (strcmp(name, HAND_PORT)) continue;
    snprintf(path, sizeof path, "/dev/%.100s", e->d_name);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    must(fd < 0, path);
    closedir(d);
    return fd;
  }
  guest_die("port", "there is no port " HAND_PORT);
}

static int entropy(const struct order *o) {
  struct { struct rand_pool_info info; uint8_t bytes[64]; } pool = {.info = {.entropy_count = 8 * (int)o->seed_size, .buf_size = (int)o->seed_size}};
  if (o->seed_size < 16 || o->seed_size > sizeof pool.bytes) { errno = EINVAL; return -1; }
  memcpy(pool.info.buf, o->seed, o->seed_size);
  int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
  int bad = fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) || ioctl(fd, RNDRESEEDCRNG, NULL);
  close_fd(&fd);
  return bad;
}

// A disk holds one directory: of this sandbox, which is made again then, or of the one that it is a copy of.
int guest_disk(struct spec *c, struct fault *f) {
  const char *id = c->id;
  module_load(late, LATE);
  for (int i = 0; !path_exists("/dev/vda"); i++) {
    if (i > 1000) return fault_set(f, "internal", 0, "the guest has no disk");
    usleep(WAIT_US);
  }
  if (mount("/dev/vda", NODE_MEDIUM, "ext4", MS_NOATIME | MS_NODEV | MS_NOSUID, "")) return fault_host(f, errno, "mount the disk");
  int dir = open(NODE_MEDIUM, O_RDONLY | O_DIRECTORY | O_CLOEXEC), copy = dup(dir), bad = 0;
  DIR *d = dir < 0 || copy < 0 ? NULL : fdopendir(copy);
  if (!d) return fault_host(f, errno, "list the disk");
  for (struct dirent *e; !bad && (e = readdir(d));) {
    if (*e->d_name == '.' || !strcmp(e->d_name, "lost+found")) continue;
    if (!strcmp(e->d_name, id)) c->turn = 1;
    else if (renameat(dir, e->d_name, dir, id)) bad = fault_host(f, errno, "take the writable layer of %.80s", e->d_name);
    else c->volume = id;
    break;
  }
  if (!bad && !c->turn && !c->volume && mkdirat(dir, id, 0755)) bad = fault_host(f, errno, "make the writable layer");
  closedir(d);
  close(dir);
  return bad;
}

int guest_awake(const struct order *o, struct fault *f) {
  struct timespec now = {.tv_sec = (time_t)(o->time_ns / 1000000000ull), .tv_nsec = (long)(o->time_ns % 1000000000ull)};
  if (clock_settime(CLOCK_REALTIME, &now)) return fault_host(f, errno, "set the clock");
  return entropy(o) ? fault_host(f, errno, "reseed") : 0;
}

int guest_sign(const char *was, const char *id, struct fault *f) {
  int dir = open(NODE_MEDIUM, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int bad = dir < 0 || renameat(dir, was, dir, id) ? fault_host(f, errno, "give the disk its name") : 0;
  close_fd(&dir);
  return bad;
}

int guest_freeze(int on) {
  int fd = open(NODE_MEDIUM, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int bad = fd < 0 || ioctl(fd, on ? FIFREEZE : FITHAW, 0);
  int err = errno;
  close_fd(&fd);
  errno = err;
  return bad ? -1 : 0;
}
