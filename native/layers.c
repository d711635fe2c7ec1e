// Layers: read-only EROFS images, each mounted once on the node and shared by every sandbox that stacks it.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
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

int layer_mount(const char *name, const char *path, struct fault *f) {
  char to[256], source[64];
  struct stat st;
  if (place(name, to, sizeof to, f)) return -1;
  if (layer_mounted(name)) return 0;
  if (!path || *path != '/') return fault_set(f, "invalid_request", 0, "the path of layer %s is not absolute", name);
  int file = host_open(path, O_RDONLY);
  if (file < 0) return fault_set(f, errno == ENOENT || errno == ENOTDIR ? "layer_not_found" : "internal", errno, "layer %s: open %s", name, path);
  if (fstat(file, &st) || !S_ISREG(st.st_mode)) {
    close(file);
    return fault_set(f, "layer_invalid", 0, "layer %s: %s is not a regular file", name, path);
  }
  if (mkdir(to, 0755) && errno != EEXIST) { close(file); return fault_host(f, errno, "make the mount point of layer %s", name); }
  snprintf(source, sizeof source, "/proc/self/fd/%d", file);
  int bad = mount(source, to, "erofs", MS_RDONLY | MS_NODEV, NULL), err = errno;
  if (bad && err == ENOTBLK) {         // the kernel does not mount EROFS from a file
    int dev = loop_attach(file, 1, 0, source, sizeof source, f);
    bad = dev < 0 || mount(source, to, "erofs", MS_RDONLY | MS_NODEV, NULL);
    err = errno;
    close_fd(&dev);
  }
  close(file);
  if (!bad) return 0;
  rmdir(to);
  if (f->code) return -1;
  if (err == EINVAL || err == EUCLEAN || err == EOPNOTSUPP || err == EIO || err == EBADMSG)
    return fault_set(f, "layer_invalid", err, "layer %s: %s is not an EROFS image that this kernel can mount", name, path);
  return fault_host(f, err, "mount layer %s from %s", name, path);
}

int layer_umount(const char *name, struct fault *f) {
  char path[256];
  if (place(name, path, sizeof path, f)) return -1;
  // sandboxes that stack it hold mounts of their own
  if (layer_mounted(name) && umount2(path, MNT_DETACH)) return fault_host(f, errno, "unmount layer %s", name);
  if (rmdir(path) && errno != ENOENT) return fault_host(f, errno, "remove the mount point of layer %s", name);
  return 0;
}
