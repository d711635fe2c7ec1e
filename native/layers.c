// Layers: read-only EROFS images, each mounted once on the node and shared by every sandbox that stacks it.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "fuse.h"
#include "loader.h"
#include "node.h"
#include "util.h"

static int place(const char *name, char *path, size_t cap, struct fault *f) {
  size_t n = name ? strlen(name) : 0;
  if (!n || n > 128 || *name == '.' || strchr(name, '/')) return fault_set(f, "invalid_request", 0, "%.80s is not a layer's name", name ? name : "");
  snprintf(path, cap, NODE_LAYERS "/%s", name);
  return 0;
}

int layer_mounted(const char *name) {
  char path[256];
  struct statx st;
  struct fault none = {0};
  return !place(name, path, sizeof path, &none) && !statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &st) &&
         st.stx_attributes & STATX_ATTR_MOUNT_ROOT;
}

// The same by FUSE: a loop device, for the reasons that fuse.c gives.
static int data_by_fuse(const char *name, const char *data, char *link, size_t cap, struct fault *f) {
  int fd = fuse_file_open(data);
  if (fd < 0) return fault_set(f, errno == ENOENT ? "layer_not_found" : "internal", errno, "layer %s: open %s through FUSE", name, data);
  int dev = loop_attach(fd, 1, 1, link, cap, f);
  close(fd);
  return dev;
}

// The data of a split image, named so that EROFS opens it anew. The mark comes first: what was opened before it never waits.
static int data_prepare(const char *name, const char *data, int fill, char *link, size_t cap, struct fault *f) {
  struct stat st;
  if (*data != '/') return fault_set(f, "invalid_request", 0, "the data path of layer %s is not absolute", name);
  if (fill && !loader_present()) return fault_set(f, "unsupported", 0, "layer %s: this machine cannot load on demand (neither fanotify pre-content events nor /dev/fuse)", name);
  int fd = host_open(data, O_PATH);
  if (fd < 0) return errno_lack(errno) ? fault_host(f, errno, "layer %s: open %s", name, data) : fault_set(f, errno == ENOENT || errno == ENOTDIR ? "layer_not_found" : "internal", errno, "layer %s: open %s", name, data);
  snprintf(link, cap, "/proc/self/fd/%d", fd);
  if (fstat(fd, &st) || !S_ISREG(st.st_mode)) fault_set(f, "layer_invalid", 0, "layer %s: %s is not a regular file", name, data);
  else if (fill && loader_mark(link)) fault_host(f, errno, "layer %s: watch reads of %s", name, data);
  if (!f->code) return fd;
  close(fd);
  return -1;
}

int layer_mount(const char *name, const char *path, const char *data, int fill, struct fault *f) {
  char to[256], source[64], link[64] = "", options[80];
  struct stat st;
  if (place(name, to, sizeof to, f)) return -1;
  if (layer_mounted(name)) return 0;
  if (!path || *path != '/') return fault_set(f, "invalid_request", 0, "the path of layer %s is not absolute", name);
  int file = host_open(path, O_RDONLY);
  if (file < 0) return errno_lack(errno) ? fault_host(f, errno, "layer %s: open %s", name, path) : fault_set(f, errno == ENOENT || errno == ENOTDIR ? "layer_not_found" : "internal", errno, "layer %s: open %s", name, path);
  if (fstat(file, &st) || !S_ISREG(st.st_mode)) {
    close(file);
    return fault_set(f, "layer_invalid", 0, "layer %s: %s is not a regular file", name, path);
  }
  if (mkdir(to, 0755) && errno != EEXIST) { close(file); return fault_host(f, errno, "make the mount point of layer %s", name); }
  int fuse = data && fill && loader_by_fuse();
  int blob = fuse ? data_by_fuse(name, data, link, sizeof link, f) : data ? data_prepare(name, data, fill, link, sizeof link, f) : -1;
  if (f->code) { close(file); rmdir(to); return -1; }
  snprintf(source, sizeof source, "/proc/self/fd/%d", file);
  snprintf(options, sizeof options, "device=%s", link);
  int bad = fuse || mount(source, to, "erofs", MS_RDONLY | MS_NODEV, data ? options : NULL), err = errno;
  if (bad && data && fill && !fuse) loader_unmark(link);
  // the kernel does not mount EROFS from a file; over a loop device nobody would wait for data, but for that of FUSE
  if (fuse || (bad && err == ENOTBLK && !data)) {
    int dev = loop_attach(file, 1, 0, source, sizeof source, f);
    bad = dev < 0 || mount(source, to, "erofs", MS_RDONLY | MS_NODEV, fuse ? options : NULL);
    err = errno;
    close_fd(&dev);
  }
  close_fd(&blob);
  close(file);
  if (!bad) return 0;
  rmdir(to);
  if (f->code) return -1;
  if (err == EINVAL || err == EUCLEAN || err == EOPNOTSUPP || err == EIO || err == EBADMSG)
    return fault_set(f, "layer_invalid", err, "layer %s: %s is not an EROFS image that this kernel can mount", name, path);
  return fault_lack(f, "mounts", err, "mount layer %s from %s", name, path);
}

int layer_umount(const char *name, struct fault *f) {
  char path[256];
  if (place(name, path, sizeof path, f)) return -1;
  // sandboxes that stack it hold mounts of their own
  if (layer_mounted(name) && umount2(path, MNT_DETACH)) return fault_host(f, errno, "unmount layer %s", name);
  if (rmdir(path) && errno != ENOENT) return fault_host(f, errno, "remove the mount point of layer %s", name);
  return 0;
}
