// Loop devices, for file systems that cannot be mounted from a file. They go away by themselves when the last user closes them.
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

int loop_attach(int file, int readonly, int direct, char *path, size_t cap, struct fault *f) {
  int control = host_open("/dev/loop-control", O_RDWR);
  if (control < 0) return fault_host(f, errno, "open /dev/loop-control");
  for (int tries = 0; tries < 64; tries++) {
    char name[32];
    int n = ioctl(control, LOOP_CTL_GET_FREE);
    if (n < 0) break;
    snprintf(name, sizeof name, "/dev/loop%d", n);
    int dev = host_open(name, readonly ? O_RDONLY : O_RDWR);
    if (dev < 0) break;
    struct loop_config c = {.fd = (uint32_t)file, .block_size = 4096,
                            .info.lo_flags = LO_FLAGS_AUTOCLEAR | (readonly ? LO_FLAGS_READ_ONLY : 0) | (direct ? LO_FLAGS_DIRECT_IO : 0)};
    if (!ioctl(dev, LOOP_CONFIGURE, &c)) {
      struct stat st;
      close(control);
      snprintf(path, cap, NODE_LOOP "/loop%d", n);
      unlink(path);
      if (fstat(dev, &st) || mknod(path, S_IFBLK | 0600, st.st_rdev)) {
        fault_host(f, errno, "make the device node %s", path);
        close_fd(&dev);
      }
      return dev;
    }
    int err = errno;
    close(dev);
    errno = err;
    if (err == EINVAL && direct) direct = 0;             // a file system without direct I/O
    else if (err != EBUSY) break;                        // somebody else took it first: try the next one
  }
  int err = errno;
  close(control);
  return fault_host(f, err, "attach a loop device");
}

int loop_find(int file, char *name, size_t cap) {
  struct stat st;
  if (fstat(file, &st)) return 0;
  for (int n = 0; n < 4096; n++) {
    struct loop_info64 info;
    struct stat have;
    snprintf(name, cap, "/dev/loop%d", n);
    int dev = host_open(name, O_RDONLY);
    if (dev < 0 && errno == ENOENT) break;
    if (dev < 0) continue;
    int same = !fstat(dev, &have) && S_ISBLK(have.st_mode) && !ioctl(dev, LOOP_GET_STATUS64, &info) && info.lo_inode == st.st_ino &&
               info.lo_device == st.st_dev;
    close(dev);
    if (same) return 1;
  }
  return 0;
}
