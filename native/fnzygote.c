// The resident interpreter, as the worker sees it: started inside the container, asked for children, believed in nothing but which of them
// ended how. It sees no call's input or output: those go between the worker and the child, which is in its box by then.
#include "fncall.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "util.h"

#define CONTROL_AS 3
#define WORDS 2048                     // of what it last wrote, for whoever wants to know why it ended
#define FIXED 13                       // namespaces, ends, the groups of CPU time and of v2
#define MOST_FDS (FIXED + CG_COUNT)

struct arm { char kind, zero[3]; uint32_t uid; uint64_t serial; } __attribute__((packed));
struct ended { char kind, zero[3]; int32_t status; uint64_t serial, rss; } __attribute__((packed));

static int control = -1, words = -1, pidfd = -1;

int zygote_socket(void) { return control; }

int zygote_start(struct sandbox *resident, const char *const *argv, const char *const *env, struct fault *f) {
  int ends[2], say[2];
  if (!node.zygote.len) return fault_set(f, "unsupported", 0, "this node keeps no interpreters");
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return fault_host(f, errno, "make a socket");
  if (pipe2(say, O_CLOEXEC | O_NONBLOCK)) {
    close(ends[0]);
    close(ends[1]);
    return fault_host(f, errno, "make a pipe");
  }
  struct entry x = {.argv = argv, .env = env, .cwd = "/", .user = "0:0", .in = -1, .out = say[1], .err = say[1], .ctl = ends[1], .ctl_as = CONTROL_AS,
                    .cgroup_fd = -1, .keep = -1, .zygote = 1};
  pid_t pid = sandbox_enter_now(resident, &x, &pidfd, f);
  close(ends[1]);
  close(say[1]);
  if (pid < 0) {
    close(ends[0]);
    close(say[0]);
    return -1;
  }
  control = ends[0];
  words = say[0];
  fcntl(control, F_SETFL, O_NONBLOCK);
  return 0;
}

// By descriptor: PID 1 of the box may not be looked at by anybody inside, and that is asked of who joins by its pidfd.
static int namespaces(const struct fnbox *b, int *fds) {
  static const char *const kinds[] = {"pid", "mnt", "ipc", "uts", "net", "cgroup"};
  char path[64];
  int n = 0;
  for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++, n++) {
    snprintf(path, sizeof path, "/proc/%d/ns/%s", b->s.init, kinds[i]);
    fds[n] = open(path, O_RDONLY | O_CLOEXEC);
  }
  return n;
}

int zygote_arm(const struct fnbox *b, uint64_t serial, const struct fn_ends *e, struct fault *f) {
  struct arm a = {.kind = 'A', .uid = b->uid, .serial = serial};
  int fds[MOST_FDS], n = namespaces(b, fds), opened = n, bad = 0, err = 0;
  const int ends[] = {e->in, e->out, e->err, e->value, e->job};
  for (unsigned i = 0; i < sizeof ends / sizeof *ends; i++) fds[n++] = ends[i];
  int procs = -1;
  if (b->cpu_join >= 0) fds[n++] = b->cpu_join;
  else procs = fds[n++] = openat(b->s.cgroup_fd, "cgroup.procs", O_WRONLY | O_CLOEXEC);
  for (int i = 0; i < CG_COUNT; i++)
    if (b->box.join[i] >= 0) fds[n++] = b->box.join[i];
  for (int i = 0; i < n; i++) bad |= fds[i] < 0;
  if (bad) fault_host(f, errno, "open the namespaces of %s", b->id);
  else {
    union { char bytes[CMSG_SPACE(sizeof fds)]; struct cmsghdr align; } space = {0};
    struct iovec io = {&a, sizeof a};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = space.bytes, .msg_controllen = CMSG_SPACE((size_t)n * sizeof *fds)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)n * sizeof *fds);
    memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof *fds);
    bad = sendmsg(control, &m, MSG_NOSIGNAL) != sizeof a;
    err = errno;
    if (bad) fault_set(f, "fncall_lost", err, "the environment's interpreter takes no call");
  }
  for (int i = 0; i < opened; i++) close_fd(&fds[i]);
  close_fd(&procs);
  return bad ? -1 : 0;
}

static int last_words(struct fault *f) {
  static char text[WORDS + 1];
  size_t n = 0;
  for (ssize_t got; (got = read(words, text + n, WORDS - n)) > 0;) {
    n += (size_t)got;
    if (n == WORDS) memmove(text, text + WORDS / 2, n = WORDS / 2);
  }
  while (n && (text[n - 1] == '\n' || text[n - 1] == ' ')) n--;
  text[n] = 0;
  const char *line = strrchr(text, '\n');
  return fault_set(f, "fncall_lost", 0, "the environment's interpreter ended: %.150s", line ? line + 1 : n ? text : "it said nothing");
}

int zygote_hear(uint64_t *serial, int *status, uint64_t *rss, struct fault *f) {
  struct ended e;
  ssize_t n;
  do n = recv(control, &e, sizeof e, 0); while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return 0;
  if (n == 1 && e.kind == 'R') return 2;
  if (n != sizeof e || e.kind != 'E') {
    close_fd(&control);
    return last_words(f);
  }
  *serial = e.serial;
  *status = e.status;
  *rss = e.rss;
  return 1;
}
