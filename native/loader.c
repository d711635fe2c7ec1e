// The loader: between the kernel's pre-content events and the filler, which brings the bytes. It keeps every event that it has read in a
// table in shared memory and reads them straight into it, so whatever it dies of, its successor answers them. It holds no layer state.
#include "loader.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
#include "fuse.h"
#include "node.h"
#include "presence.h"
#include "util.h"

#ifndef FAN_PRE_ACCESS
#define FAN_PRE_ACCESS 0x00100000      // Linux 6.14
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#define INFO_RANGE 6                   // FAN_EVENT_INFO_TYPE_RANGE
#define ALLOW FAN_ALLOW
#define DENY(e) (FAN_DENY | (uint32_t)(e) << 24)

#define OWN 64                         // descriptors below are the loader's; the numbers of events are above
#define SLOTS 16384
#define FULL (SLOTS - 256)             // then no more are read: they wait in the kernel
#define TICK_MS 200
#define NONE 0xffffffffu
#define NOTICE 0xfffffffeu
enum { NUL = 3, LIFE = 4, LISTEN = 5 };

struct range { struct fanotify_event_info_header h; uint32_t pad; uint64_t off, count; };
// An event that was read and not answered yet, at the index of its descriptor's number: that is how the kernel knows it.
struct slot { uint64_t serial, dev, ino, off, count, arrived_ns; int32_t pid; uint32_t pending; };
struct table {
  uint64_t serial, expired;
  _Alignas(8) char raw[4096];          // one read; all zero when nothing in it is unseen
  struct slot slots[SLOTS];
  struct fuse_state fuse;              // then an event is a request, and its slot is any that is free
};

// To the filler; number NONE: `count` events had no answer in time since the group was made; NOTICE: a read at an edge, let through.
struct ask { uint64_t serial, dev, ino, off, count; uint32_t number, pid; };
// From the filler; number NONE comes with the descriptor of a file that is complete: its mark goes; NOTICE: of a map (presence.h).
struct reply { uint64_t serial; uint32_t number, error; };

static struct table *table;
static uint8_t sent[SLOTS];
static unsigned top, pending, unsent;  // slots in use are below `top`
static int by_fuse;
static int filler = -1;
static pid_t filler_pid;
static uint64_t deadline_ns;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// ---- the launcher's side ----------------------------------------------------------------------------------------------------------------

static int place(int fd, int number) {
  if (fd < 0) return -1;
  int bad = dup3(fd, number, O_CLOEXEC) < 0;
  close(fd);
  return bad ? -1 : 0;
}

static int take(pid_t aether) {
  int pidfd = sys_pidfd_open(aether), bad = pidfd < 0;
  for (int n = LOADER_GROUP; n <= LOADER_LIFE && !bad; n++) bad = place((int)syscall(SYS_pidfd_getfd, pidfd, n, 0), n);
  close_fd(&pidfd);
  return bad ? -1 : 0;
}

// A group whose events this kernel really has, for files where the layers are: tried on one that has no name. -1: it has not.
static int new_group(struct fault *f) {
  char path[32];
  int group = fanotify_init(FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS | FAN_CLOEXEC | FAN_NONBLOCK, O_RDONLY | O_LARGEFILE | O_CLOEXEC);
  if (group < 0) return errno == EMFILE ? fault_host(f, errno, "make a fanotify group") : -1;
  int file = open(node.state, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  if (file >= 0 && fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, AT_FDCWD, path)) close_fd(&group);
  close_fd(&file);
  return group;
}

int loader_open(pid_t join, struct fault *f) {
  int life[2];
  if (join && !take(join)) return 0;
  for (int n = LOADER_GROUP; n <= LOADER_LIFE; n++) close(n);            // an aether of before there was a loader had some other use for one
  int group = node.fill_by == FILL_FUSE ? -1 : new_group(f);
  if (group < 0 && !f->code && node.fill_by != FILL_FANOTIFY) group = fuse_open(f);
  if (group < 0) return f->code ? -1 : 0;
  int memory = memfd_create("loader", MFD_CLOEXEC);
  if (place(group, LOADER_GROUP) || memory < 0 || ftruncate(memory, sizeof(struct table)) || place(memory, LOADER_TABLE) || pipe2(life, O_CLOEXEC | O_NONBLOCK))
    return fault_host(f, errno, "make the table of the loader");
  close(life[0]);                      // a loader opens an end of its own
  return place(life[1], LOADER_LIFE) ? fault_host(f, errno, "make the table of the loader") : 0;
}

int loader_present(void) { return fcntl(LOADER_GROUP, F_GETFD) >= 0; }

int loader_by_fuse(void) {
  struct stat st;
  return !fstat(LOADER_GROUP, &st) && S_ISCHR(st.st_mode);
}

int loader_mark(const char *path) { return fanotify_mark(LOADER_GROUP, FAN_MARK_ADD, FAN_PRE_ACCESS, AT_FDCWD, path); }

void loader_unmark(const char *path) { if (!loader_by_fuse()) fanotify_mark(LOADER_GROUP, FAN_MARK_REMOVE, FAN_PRE_ACCESS, AT_FDCWD, path); }

static void run(void) __attribute__((noreturn));

int loader_start(struct fault *f) {
  if (!loader_present()) return -1;
  int pidfd = -1;
  struct clone_args a = {.flags = CLONE_PIDFD, .pidfd = (uintptr_t)&pidfd, .exit_signal = SIGCHLD};
  pid_t pid = sys_clone3(&a);
  if (!pid) run();
  return pid > 0 ? pidfd : fault_host(f, errno, "start the loader");
}

// ---- events -----------------------------------------------------------------------------------------------------------------------------

static void answer(unsigned number, uint32_t response) {
  struct slot *s = &table->slots[number - OWN];
  struct fanotify_response r = {.fd = (int)number, .response = response};
  if (by_fuse) fuse_answer(&(struct fuse_read){s->serial, s->dev, s->ino, s->off, s->count}, response == ALLOW ? 0 : EIO);
  else (void)!write(LOADER_GROUP, &r, sizeof r);         // ENOENT: its reader was killed meanwhile
  s->pending = 0;
  if (!sent[number - OWN]) unsent--;
  pending--;
  if (!by_fuse) close((int)number);
}

static int tell(const struct ask *a) { return send(filler, a, sizeof *a, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof *a ? 0 : -1; }

static void pass(unsigned index) {
  const struct slot *s = &table->slots[index];
  if (filler < 0 || sent[index]) return;
  // the filler writes through a descriptor that may be younger than the mark: it must not wait for itself
  if (s->pid == filler_pid) { answer(index + OWN, ALLOW); return; }
  int there = presence_of(s->dev, s->ino, s->off, s->count);
  if (there == EDGE) tell(&(struct ask){0, s->dev, s->ino, s->off, s->count, NOTICE, (uint32_t)s->pid});
  if (there != ABSENT) { answer(index + OWN, ALLOW); return; }
  struct ask a = {s->serial, s->dev, s->ino, s->off, s->count, index + OWN, (uint32_t)s->pid};
  if (tell(&a)) return;                // its socket is full (POLLOUT comes) or it is gone (POLLHUP comes)
  sent[index] = 1;
  unsent--;
}

static void pass_all(void) {
  for (unsigned i = 0; i < top && unsent; i++)
    if (table->slots[i].pending) pass(i);
}

static void keep(unsigned index, struct slot s) {
  s.arrived_ns = now_ns();
  table->slots[index] = s;
  __atomic_store_n(&table->slots[index].pending, 1, __ATOMIC_RELEASE);
  sent[index] = 0;
  pending++;
  unsent++;
  if (index >= top) top = index + 1;
}

// Everything in table->raw goes to its slot; what is there already, from before a predecessor's death, stays as it is. The number of bytes
// that were read is not needed, and a successor would not know it: the rest is zero.
static void sort_raw(int mine) {
  for (char *p = table->raw; p + sizeof(struct fanotify_event_metadata) <= table->raw + sizeof table->raw;) {
    struct fanotify_event_metadata *m = (void *)p;
    char *end = p + m->event_len;
    if (m->event_len < sizeof *m || end > table->raw + sizeof table->raw || m->vers != FANOTIFY_METADATA_VERSION) break;
    struct range r = {0};
    for (char *i = p + m->metadata_len; i + sizeof r.h <= end && ((struct fanotify_event_info_header *)i)->len >= sizeof r.h;
         i += ((struct fanotify_event_info_header *)i)->len)
      if (((struct fanotify_event_info_header *)i)->info_type == INFO_RANGE) memcpy(&r, i, sizeof r);
    unsigned index = (unsigned)m->fd - OWN;
    if (m->fd >= OWN && index < SLOTS && !table->slots[index].pending) {
      // a predecessor's descriptor died with it, and which file it was: inode 0 stands for every file
      if (!mine) dup3(NUL, m->fd, O_CLOEXEC);
      struct stat st = {0};
      if (mine) fstat(m->fd, &st);
      keep(index, (struct slot){.serial = ++table->serial, .dev = st.st_dev, .ino = st.st_ino, .off = r.off, .count = r.count, .pid = m->pid});
    }
    p = end;
  }
  memset(table->raw, 0, sizeof table->raw);
}

// A request of FUSE goes to a free slot; a predecessor may have put it into one already.
static void keep_request(const struct fuse_read *r, int mine) {
  static unsigned next;
  for (unsigned i = 0; i < top && !mine; i++)
    if (table->slots[i].pending && table->slots[i].serial == r->unique) return;
  while (table->slots[next % SLOTS].pending) next++;
  keep(next++ % SLOTS, (struct slot){.serial = r->unique, .dev = r->dev, .ino = r->ino, .off = r->off, .count = r->count});
}

static void read_requests(void) {
  struct fuse_read r;
  for (int got; pending < FULL && (got = fuse_next(&r)) >= 0;) {
    if (!got) continue;
    keep_request(&r, 1);
    fuse_noted();
  }
}

static void read_events(void) {
  if (by_fuse) { read_requests(); if (filler >= 0) pass_all(); return; }
  if (read(LOADER_GROUP, table->raw, sizeof table->raw) < 0 && errno != EAGAIN && errno != EINTR)
    fprintf(stderr, "loader: read of events: %s\n", strerror(errno));
  sort_raw(1);
  if (filler >= 0) pass_all();
}

static void expire(void) {
  uint64_t now = now_ns(), late = 0;
  for (unsigned i = 0; i < top; i++) {
    const struct slot *s = &table->slots[i];
    if (!s->pending || now - s->arrived_ns < deadline_ns) continue;
    fprintf(stderr, "loader: event %llu of inode %llu at %llu+%llu had no answer in %llu s: EIO\n", (unsigned long long)s->serial,
            (unsigned long long)s->ino, (unsigned long long)s->off, (unsigned long long)s->count, (unsigned long long)(deadline_ns / 1000000000u));
    answer(i + OWN, DENY(EIO));
    late++;
  }
  table->expired += late;
  struct ask a = {.number = NONE, .count = table->expired};
  if (late && filler >= 0) tell(&a);
}

// ---- the filler -------------------------------------------------------------------------------------------------------------------------

static void drop_filler(void) {
  close_fd(&filler);
  filler_pid = 0;
  presence_drop();
  memset(sent, 0, sizeof sent);
  unsent = pending;                    // the next one gets all of them
}

static void accept_filler(void) {
  struct ucred who;
  socklen_t size = sizeof who;
  int fd = accept4(LISTEN, NULL, NULL, SOCK_CLOEXEC);
  if (fd < 0) return;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) || who.uid != geteuid()) { close(fd); return; }
  if (filler >= 0) drop_filler();      // two would both write; the newer one is the node's
  filler = fd;
  filler_pid = who.pid;
  pass_all();
}

static void read_filler(void) {
  for (;;) {
    struct reply r;
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
    struct iovec v = {&r, sizeof r};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(filler, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    int fd = -1;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof fd)) memcpy(&fd, CMSG_DATA(c), sizeof fd);
    if (n != sizeof r) { close_fd(&fd); drop_filler(); return; }
    unsigned index = r.number - OWN;
    if (r.number == NONE && fd >= 0 && by_fuse) fuse_whole(fd);
    else if (r.number == NONE && fd >= 0) fanotify_mark(LOADER_GROUP, FAN_MARK_REMOVE, FAN_PRE_ACCESS, fd, NULL);
    else if (r.number == NOTICE && fd >= 0) presence_take(fd);
    // the serial: its event may have expired, and the number may be another event's by now
    else if (r.number >= OWN && index < SLOTS && table->slots[index].pending && table->slots[index].serial == r.serial)
      answer(r.number, r.error ? DENY(r.error) : ALLOW);
    close_fd(&fd);
  }
}

// ---- its life ---------------------------------------------------------------------------------------------------------------------------

// One loader a group: the lock is the kernel's word on who it is. A predecessor that still lives is of a launcher that is gone.
static void take_over(void) {
  for (;;) {
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    if (!fcntl(LOADER_TABLE, F_SETLK, &l)) return;
    if (!fcntl(LOADER_TABLE, F_GETLK, &l) && l.l_type != F_UNLCK && l.l_pid > 0) kill(l.l_pid, SIGKILL);
    nap_us(2000);
  }
}

static int listen_there(void) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  if (snprintf(a.sun_path, sizeof a.sun_path, "%s/loader.sock", node.run) >= (int)sizeof a.sun_path) { errno = ENAMETOOLONG; return -1; }
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  umask(077);
  unlink(a.sun_path);
  if (s >= 0 && (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 4))) close_fd(&s);
  return s;
}

static void move(int fd, int to) {
  if (fd < 0 || (fd != to && (dup3(fd, to, O_CLOEXEC) < 0 || close(fd)))) {
    fprintf(stderr, "loader: cannot start: %s\n", strerror(errno));
    _exit(1);
  }
}

static void prepare(void) {
  deadline_ns = node.fill_ms * 1000000u;
  // Whoever leaves the node's mounts last unmounts them, and that waits for reads that are under way: not the process that answers them.
  by_fuse = loader_by_fuse();
  if (by_fuse && setns(node.host_ns, CLONE_NEWNS)) { fprintf(stderr, "loader: cannot leave the mounts: %s\n", strerror(errno)); _exit(1); }
  prctl(PR_SET_NAME, "loader", 0, 0, 0);
  char title[4096];
  snprintf(title, sizeof title, "aether loader %s", node.run);
  node.run = strdup(node.run);         // these lie in what is overwritten
  node.state = strdup(node.state);
  memset(node.title, 0, node.title_size);
  snprintf(node.title, node.title_size, "%s", title);
  setsid();
  signal(SIGPIPE, SIG_IGN);
  close_range(3, LOADER_GROUP - 1, 0);
  table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, LOADER_TABLE, 0);
  if (table == MAP_FAILED) _exit(1);
  move(fcntl(0, F_DUPFD_CLOEXEC, NUL), NUL);             // the node's root has no /dev
  move(open("/proc/self/fd/63", O_RDONLY | O_NONBLOCK | O_CLOEXEC), LIFE);
  close(LOADER_LIFE);
  take_over();
  move(listen_there(), LISTEN);
  // own numbers are all taken, so every event's is above; and those of events that wait are not given to others
  for (int n = 0; n < OWN; n++)
    if (fcntl(n, F_GETFD) < 0) move(fcntl(NUL, F_DUPFD_CLOEXEC, n), n);
  for (unsigned i = 0; i < SLOTS; i++) {
    if (!table->slots[i].pending) continue;
    if (!by_fuse) dup3(NUL, (int)i + OWN, O_CLOEXEC);
    pending++;
    unsent++;
    top = i + 1;
  }
  if (!by_fuse) { sort_raw(0); return; }
  struct fuse_read r;
  fuse_begin(&table->fuse, LOADER_GROUP);
  if (fuse_again(&r) > 0) keep_request(&r, 0);
  fuse_noted();
}

static void run(void) {
  prepare();
  for (uint64_t swept = 0;;) {
    struct pollfd p[] = {{.fd = pending < FULL ? LOADER_GROUP : -1, .events = POLLIN},
                         {.fd = LIFE, .events = 0},
                         {.fd = LISTEN, .events = POLLIN},
                         {.fd = filler, .events = (short)(POLLIN | (unsent ? POLLOUT : 0))}};
    if (poll(p, 4, pending ? TICK_MS : -1) < 0 && errno != EINTR) _exit(1);
    if (p[0].revents & POLLERR) _exit(1);                // FUSE was unmounted: nobody can wait any more
    // first: what a dead filler said is there may be another file's number by now
    if (p[3].revents & (POLLIN | POLLHUP | POLLERR) && filler >= 0) read_filler();
    if (p[0].revents & POLLIN) read_events();
    if (p[3].revents & POLLOUT) pass_all();
    if (p[2].revents & POLLIN) accept_filler();
    if (p[1].revents & POLLHUP) _exit(0);                // the launcher and every sandbox are gone
    uint64_t now = now_ns();
    if (pending && now - swept > TICK_MS * 1000000u) { expire(); swept = now; }
  }
}
