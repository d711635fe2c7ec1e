// Removing what a sandbox left behind, whoever made it and however much of it there is. Every step may find nothing.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "fncall.h"
#include "node.h"
#include "util.h"

#define DEATH_MS 10000

// A worker marks its run directory when it begins; its boxes have groups of their own beside its own.
static void worker_sweep(const struct spec *c, struct fault *f) {
  char path[4200], id[96];
  snprintf(path, sizeof path, "%s/" FN_MARK, c->run_dir);
  for (int i = 0; path_exists(path) && i < FN_BOXES; i++) {
    snprintf(id, sizeof id, FN_GROUP, c->id, i);
    if (cgroup_remove(id)) fault_host(f, errno, "remove the cgroups of %s", id);
  }
}

int sandbox_sweep(const struct spec *c, struct fault *f) {
  worker_sweep(c, f);
  if (cgroup_remove(c->id)) fault_host(f, errno, "remove the cgroups of %s", c->id);
  // the last process is gone, but the kernel may still be taking its mounts down
  for (int i = 0; !c->keep && medium_forget(c->id); i++) {
    if (i == 100 || (errno != EBUSY && errno != ETXTBSY)) { fault_host(f, errno, "remove the writable layer of %s", c->id); break; }
    nap_us(10000);
  }
  if (remove_all(AT_FDCWD, c->run_dir)) fault_host(f, errno, "remove %s", c->run_dir);
  return f->code ? -1 : 0;
}

// The aether that listens there, if one lives, by the kernel's word.
static int end_supervisor(const struct spec *c, struct fault *f) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  struct ucred who;
  socklen_t size = sizeof who;
  if (snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", c->run_dir) >= (int)sizeof a.sun_path)
    return fault_set(f, "invalid_request", ENAMETOOLONG, "the path of the socket in %s", c->run_dir);
  int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int there = s >= 0 && !connect(s, (struct sockaddr *)&a, sizeof a) && !getsockopt(s, SOL_SOCKET, SO_PEERCRED, &who, &size) && who.pid > 0;
  int pidfd = there ? sys_pidfd_open(who.pid) : -1;
  int bad = 0;
  if (pidfd >= 0) {
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    sys_pidfd_kill(pidfd, SIGKILL);
    if (poll(&p, 1, DEATH_MS) <= 0) bad = fault_set(f, "internal", 0, "the supervisor of %s (pid %d) does not die", c->id, who.pid);
  }
  close_fd(&pidfd);
  close_fd(&s);
  return bad;
}

int reap(const struct spec *c, struct fault *f) {
  if (end_supervisor(c, f) || sandbox_sweep(c, f)) return -1;
  // what is kept has lost its supervisor, and nobody else says when it is on the disk
  return c->keep && node.medium >= 0 && syncfs(node.medium) ? fault_host(f, errno, "write the files of %s back", c->id) : 0;
}
