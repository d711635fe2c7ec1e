// Files that the platform gives a sandbox: secrets, and settings of clients. They lie on a tmpfs of their own that is mounted read-only over
// /run/secrets and /run/mirrors and goes with the sandbox: no layer, snapshot, diff or copy ever has them, and they are never swapped out.
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

static int put(const struct sandbox *s, const struct gift *g, int dir, struct fault *f) {
  int fd = openat(dir, strchr(g->name, '/') + 1, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  int bad = fd < 0 || write(fd, g->data, g->size) != (ssize_t)g->size || fchown(fd, s->spec.uid_base + g->uid, s->spec.uid_base + g->gid) || fchmod(fd, g->mode);
  if (bad) fault_host(f, errno, "write /run/%.80s of %s", g->name, s->spec.id);
  close_fd(&fd);
  return bad ? -1 : 0;
}

static int make(const struct sandbox *s, const char *path, struct fault *f) {
  if (mkdir(path, 0755)) return errno == EEXIST ? 0 : fault_set(f, "layer_invalid", errno, "%s cannot be made", path);
  return lchown(path, s->spec.uid_base, s->spec.uid_base) ? fault_host(f, errno, "make %s of %s", path, s->spec.id) : 0;
}

// A directory to mount on. In a sandbox that is made again an agent may have put something else there, which has to go.
static int place(const struct sandbox *s, const char *path, struct fault *f) {
  struct stat st;
  if (!lstat(path, &st) && !S_ISDIR(st.st_mode) && unlink(path)) return fault_host(f, errno, "clear %s of %s", path, s->spec.id);
  return make(s, path, f);
}

static int directory(const struct sandbox *s, const char *name, struct fault *f) {
  char path[32], id[16];
  size_t n = strlen(name);
  int some = 0;
  for (int i = 0; i < s->spec.ngiven; i++) some |= !strncmp(s->spec.given[i].name, name, n);
  if (!some) return 0;
  snprintf(id, sizeof id, "%u", s->spec.uid_base);
  snprintf(path, sizeof path, "/run/%.*s", (int)n - 1, name);
  const char *const options[] = {"source", "given", "size", "2m", "nr_inodes", "128", "mode", "0755", "uid", id, "gid", id, "noswap", NULL, NULL};
  int fd = fs_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
  if (fd < 0) return fault_host(f, errno, "mount %s of %s", path, s->spec.id);
  int bad = 0;
  for (int i = 0; !bad && i < s->spec.ngiven; i++)
    if (!strncmp(s->spec.given[i].name, name, n)) bad = put(s, &s->spec.given[i], fd, f);
  struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY};
  if (!bad && mount_setattr(fd, "", AT_EMPTY_PATH, &read_only, sizeof read_only)) bad = fault_host(f, errno, "make %s of %s read-only", path, s->spec.id);
  if (!bad && (bad = place(s, path, f)) == 0 && attach(fd, path)) bad = fault_set(f, "layer_invalid", errno, "%s is not a directory to mount on", path);
  close(fd);
  return bad ? -1 : 0;
}

int given_mount(const struct sandbox *s, struct fault *f) {
  if (!s->spec.ngiven) return 0;
  return make(s, "/run", f) || directory(s, "secrets/", f) || directory(s, "mirrors/", f) ? -1 : 0;
}
