// The launcher's life: get ready, then answer one request a message until the edge goes away. It keeps no state about sandboxes; each
// CREATE and REAP is a child that answers by itself.
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/btrfs.h>
#include <linux/mount.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "loader.h"
#include "node.h"
#include "util.h"
#include "wire.h"

#define CONTROL 3
#define MEDIUM_LOW (256u << 20)        // bytes free
#define FILTER_MAX 4096                // instructions, the kernel's own limit
#ifndef MFD_EXEC
#define MFD_EXEC 0x10u                 // Linux 6.3
#endif
#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

struct node node = {.control = CONTROL, .host_ns = -1, .own_ns = -1, .init_fd = -1, .medium = -1, .qgroups = -1, .criu = -1, .join = -1, .cache = -1,
                    .loader = -1, .fill_ms = 30000};
extern const char init_start[], init_end[], join_start[], join_end[];

static uint8_t request[sizeof(struct frame) + WIRE_MAX];
static uint8_t reply[4096];
static struct order order;
static struct sandbox sandbox;

// Children that have not answered yet. One that dies over its request leaves a pipe that ends without a word; then the launcher answers.
#define MAX_WORK 256
static struct work { int pipe; uint32_t request; } work[MAX_WORK];
static int working;
static int word = -1;                  // the child's end of its pipe

// ---- getting ready ----------------------------------------------------------------------------------------------------------------------

static int program_memfd(const char *name) {
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
  return fd < 0 && errno == EINVAL ? memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

// From a sealed copy in memory: whoever gets hold of /proc/<pid>/exe from inside a sandbox cannot write to it.
static int run_sealed(char **argv, struct fault *f) {
  struct stat st;
  int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  if (self < 0 || fstat(self, &st)) return fault_host(f, errno, "open /proc/self/exe");
  int seals = fcntl(self, F_GET_SEALS);
  if (seals >= 0 && (seals & SEALS) == SEALS) { close(self); return 0; }
  int copy = program_memfd("aether");
  if (copy < 0) return fault_host(f, errno, "make a copy of the program in memory");
  for (off_t at = 0; at < st.st_size;)
    if (sendfile(copy, self, &at, (size_t)(st.st_size - at)) <= 0) return fault_host(f, errno, "copy the program into memory");
  if (fchmod(copy, 0500) || fcntl(copy, F_ADD_SEALS, SEALS)) return fault_host(f, errno, "seal the program in memory");
  extern char **environ;
  fexecve(copy, argv, environ);
  return fault_host(f, errno, "run the program from memory");
}

static int embedded(const char *name, const char *start, const char *end, mode_t mode, int *fd, struct fault *f) {
  size_t n = (size_t)(end - start);
  int made = program_memfd(name);
  if (made < 0 || write(made, start, n) != (ssize_t)n || fchmod(made, mode) || fcntl(made, F_ADD_SEALS, SEALS))
    return fault_host(f, errno, "make the program %s", name);
  // a descriptor for reading only: one open for writing would refuse the exec
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", made);
  *fd = open(path, O_RDONLY | O_CLOEXEC);
  if (*fd < 0) return fault_host(f, errno, "open the program %s", name);
  close(made);
  return 0;
}

// A tree of its own with nothing above it, as criu keeps it open while it is inside a sandbox.
static int take_criu(const char *path, struct fault *f) {
  struct mount_attr a = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
  node.criu = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
  if (node.criu < 0 || mount_setattr(node.criu, "", AT_EMPTY_PATH, &a, sizeof a)) return fault_host(f, errno, "take criu in %s", path);
  const char *const options[] = {"source", "criu", "size", "256k", "mode", "0700", NULL}; // it keeps that on a tmpfs only
  if ((node.cache = fs_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)) < 0)
    return fault_host(f, errno, "mount the cache of criu");
  return embedded("join", join_start, join_end, 0444, &node.join, f);
}

static int read_filter(const char *path, struct sock_fprog *to, struct sock_filter *code, struct fault *f) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) return fault_set(f, "internal", errno, "open the seccomp filter %s", path);
  size_t n = (size_t)st.st_size;
  int bad = !n || n > FILTER_MAX * sizeof *code || n % sizeof *code || read(fd, code, n) != (ssize_t)n;
  close(fd);
  if (bad) return fault_set(f, "internal", 0, "%s is not a raw seccomp filter of at most %d instructions", path, FILTER_MAX);
  *to = (struct sock_fprog){(unsigned short)(n / sizeof *code), code};
  return 0;
}

static int null_streams(struct fault *f) {
  int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  int bad = fd < 0 || dup2(fd, 0) < 0 || dup2(fd, 1) < 0 || (fcntl(2, F_GETFD) < 0 && dup2(fd, 2) < 0);
  if (fd > 3) close(fd);
  return bad ? fault_host(f, errno, "open /dev/null") : 0;
}

// What our starter ignored would be ignored by every program inside. libc keeps two signals from its callers, so it is not asked.
static void default_signals(void) {
  const struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } none = {0};
  for (int n = 1; n <= 64; n++) syscall(SYS_rt_sigaction, n, &none, NULL, sizeof none.mask);
}

static struct sock_filter usual[FILTER_MAX];

int node_programs(const char *filter, struct fault *f) {
  return null_streams(f) || embedded("init", init_start, init_end, 0111, &node.init_fd, f) || read_filter(filter, &node.filter, usual, f) || cgroup_open(f) ? -1 : 0;
}

static int prepare(const char *filter, const char *zygote, const char *criu, pid_t join, const pid_t *cores, char **argv, struct fault *f) {
  static struct sock_filter warm[FILTER_MAX];
  struct rlimit files;
  if (run_sealed(argv, f) || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) return fault_host(f, errno, "become undumpable");
  prctl(PR_SET_NAME, "aether", 0, 0, 0);
  if (!getrlimit(RLIMIT_NOFILE, &files)) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  if (node_programs(filter, f)) return -1;
  if (zygote && read_filter(zygote, &node.zygote, warm, f)) return -1;
  struct fault none = {0};             // which is no reason to have no sandboxes
  if (criu && take_criu(criu, &none)) {
    fprintf(stderr, "launcher: %s: no forks with memory\n", none.message);
    close_fd(&node.criu);
  }
  if ((node.host_ns = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0) return fault_host(f, errno, "open the mount namespace");
  if (join ? root_join(join, f) : root_make(f)) return -1;
  if ((node.own_ns = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0) return fault_host(f, errno, "open the mount namespace");
  if (loader_open(join, f)) return -1;
  node.masks = masks_present();
  if (join) medium_open();             // absent when the earlier launcher had none
  fcntl(CONTROL, F_SETFD, FD_CLOEXEC);
  default_signals();
  signal(SIGCHLD, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  if (core_open(cores, f)) return -1;
  node.loader = loader_start(f);
  return f->code ? -1 : 0;
}

// ---- answering ----------------------------------------------------------------------------------------------------------------------------

static int answer(uint8_t type, uint32_t number, const struct fault *f) {
  struct buf b = {.data = reply, .cap = sizeof reply};
  frame_begin(&b, type, 0, number);
  if (type == F_ERROR) {
    frame_text(&b, T_CODE, f->code);
    frame_text(&b, T_MESSAGE, f->message);
    frame_u64(&b, T_ERRNO, (uint64_t)f->err);
    if (f->resource) frame_text(&b, T_RESOURCE, f->resource);
  }
  return frame_send(CONTROL, &b);
}

// The child has sent its answer.
static void answered(void) {
  (void)!write(word, "", 1);
  close_fd(&word);
}

static void create(uint32_t number, int userns, struct fault *f) __attribute__((noreturn));
static void create(uint32_t number, int userns, struct fault *f) {
  signal(SIGCHLD, SIG_DFL);
  setsid();
  close_fd(&node.host_ns);
  close_fd(&node.own_ns);
  close_fd(&node.loader);
  userns_forget(userns);
  if (core_take((int)order.spec.cpu_class, f) || sandbox_create(&sandbox, &order.spec, userns, f)) {
    answer(F_ERROR, number, f);
    answered();
    _exit(1);
  }
  struct buf b = {.data = reply, .cap = sizeof reply};
  frame_begin(&b, F_READY, 0, number);
  frame_text(&b, T_ID, sandbox.spec.id);
  frame_u64(&b, T_PID, (uint64_t)getpid());
  frame_u64(&b, T_INIT_PID, (uint64_t)sandbox.init);
  if (frame_send(CONTROL, &b)) {       // the edge is gone and will never know of this one
    sandbox_kill(&sandbox);
    sandbox_remove(&sandbox);
    _exit(1);
  }
  answered();
  close(CONTROL);
  if (sandbox.spec.worker) fncall_main(&sandbox);
  close_fd(&node.init_fd);
  class_supervise(&sandbox.spec);
  aether_main(&sandbox);
}

static void disk_usage(uint32_t number) {
  struct statfs st = {0};
  if (node.medium >= 0) fstatfs(node.medium, &st);
  // what was freed counts as used until the next commit, which may be half a minute away: begin it
  if (node.medium >= 0 && (uint64_t)st.f_bavail * (uint64_t)st.f_bsize < MEDIUM_LOW) (void)ioctl(node.medium, BTRFS_IOC_START_SYNC, NULL);
  struct buf b = {.data = reply, .cap = sizeof reply};
  uint64_t block = (uint64_t)st.f_bsize;
  frame_begin(&b, F_STATUS, 0, number);
  frame_u64(&b, T_SIZE, st.f_blocks * block);
  frame_u64(&b, T_DISK_USED, (st.f_blocks - st.f_bfree) * block);
  frame_u64(&b, T_BYTES, st.f_bavail * block);           // free
  frame_send(CONTROL, &b);
}

// A process for one request, which answers by itself. In the child: 0.
static pid_t begin(uint32_t number, struct fault *f) {
  int p[2];
  if (working == MAX_WORK) return fault_set(f, "resource_exhausted", 0, "%d requests are under way", working);
  if (pipe2(p, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
  pid_t pid = fork();
  if (pid < 0) fault_host(f, errno, "start a process");
  close(p[pid ? 1 : 0]);
  if (pid < 0) close(p[0]);
  if (pid > 0) work[working++] = (struct work){p[0], number};
  if (pid) return pid;
  for (int i = 0; i < working; i++) close(work[i].pipe);
  word = p[1];
  return 0;
}

// `i` has answered or is dead. The errno tells the edge that something may be left.
static void ended(int i) {
  char byte;
  struct fault f = {0};
  ssize_t n = read(work[i].pipe, &byte, 1);
  close(work[i].pipe);
  if (n != 1) {
    fault_set(&f, "resource_exhausted", EOWNERDEAD, "the process that served the request was killed");
    answer(F_ERROR, work[i].request, &f);
  }
  work[i] = work[--working];
}

static int put(struct fault *f) {
  struct spec *c = &order.spec;
  if (spec_check(c, node.cgroup, 0, f)) return -1;
  if (!c->volume || !snapshot_named(c->volume)) return fault_set(f, "invalid_request", 0, "PUT_SNAPSHOT: no name of a snapshot");
  umask(0);
  return medium_put(c, f);
}

// For a microVM, whose disk is an image in it that has to be there before its supervisor.
static int make_volume(struct fault *f) {
  struct spec *c = &order.spec;
  static struct box box;
  struct sandbox s = {.spec = *c, .box = &box};
  if (spec_check(c, node.cgroup, 0, f)) return -1;
  if (c->volume && !snapshot_named(c->volume)) return fault_set(f, "invalid_request", 0, "MAKE_VOLUME: %.70s is not the name of a snapshot", c->volume);
  s.spec.disk_bytes = c->disk_bytes;
  if (!medium_make(&s, f)) return 0;
  if (!c->turn) medium_forget(c->id);
  return -1;
}

static void serve(const struct frame *h, size_t size) {
  struct fault f = {0};
  int userns = -1, bad = order_read(&order, h, request + sizeof *h, size, &f);
  if (!bad && h->type == F_CREATE)
    bad = spec_check(&order.spec, node.cgroup, 1, &f) || core_hold((int)order.spec.cpu_class, 0, &f) || (order.spec.userns && (userns = userns_get(order.spec.uid_base, &f)) < 0);
  // (un)mounting what FUSE serves waits for the loader, which only this process brings back when it dies
  int waits = loader_by_fuse() && ((h->type == F_MOUNT_LAYER && order.fill) || h->type == F_UMOUNT_LAYER);
  if (!bad && (h->type == F_CREATE || h->type == F_REAP || h->type == F_PUT_SNAPSHOT || h->type == F_MAKE_VOLUME || waits)) {
    pid_t pid = begin(h->request, &f);
    if (pid > 0) return;               // the child answers
    if (!pid && h->type == F_CREATE) create(h->request, userns, &f);
    if (!pid) {
      if (h->type == F_REAP) bad = spec_check(&order.spec, node.cgroup, 0, &f) || reap(&order.spec, &f);
      else if (h->type == F_PUT_SNAPSHOT) bad = put(&f);
      else if (h->type == F_MAKE_VOLUME) bad = make_volume(&f);
      else bad = h->type == F_UMOUNT_LAYER ? layer_umount(order.name, &f) : layer_mount(order.name, order.path, order.data, order.fill, &f);
      answer(bad ? F_ERROR : F_OK, h->request, &f);
      answered();
      _exit(0);
    }
    bad = -1;
  } else if (!bad) {
    switch (h->type) {
      case F_MOUNT_LAYER: bad = layer_mount(order.name, order.path, order.data, order.fill, &f); break;
      case F_UMOUNT_LAYER: bad = layer_umount(order.name, &f); break;
      case F_MOUNT_MEDIUM: bad = medium_mount(order.path, order.bytes, order.name, order.keep, order.nkeep, &f); break;
      case F_DROP_SNAPSHOT:
        bad = !order.name || !snapshot_named(order.name) ? fault_set(&f, "invalid_request", 0, "DROP_SNAPSHOT: no name of a snapshot")
              : medium_remove(order.name) ? fault_host(&f, errno, "remove the snapshot %.100s", order.name) : 0;
        break;
      case F_DISK_USAGE: disk_usage(h->request); return;
      default: bad = fault_set(&f, "wire_field", 0, "the launcher knows no request of type %u", h->type);
    }
  }
  answer(bad ? F_ERROR : F_OK, h->request, &f);
}

// Whatever the loader died of: readers wait for the next one.
static void revive(void) {
  static uint64_t last;
  struct timespec t;
  struct fault f = {0};
  clock_gettime(CLOCK_MONOTONIC, &t);
  uint64_t now = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
  close_fd(&node.loader);
  if (now - last < 200) return;        // one that cannot live must not keep us from our work: poll comes back to it
  last = now;
  fprintf(stderr, "launcher: the loader died and is started again\n");
  if ((node.loader = loader_start(&f)) < 0) fprintf(stderr, "launcher: %s\n", f.message);
}

static int loop(void) {
  for (;;) {
    struct frame h;
    struct pollfd p[2 + MAX_WORK] = {{.fd = CONTROL, .events = POLLIN}, {.fd = node.loader, .events = POLLIN}};
    for (int i = 0; i < working; i++) p[2 + i] = (struct pollfd){.fd = work[i].pipe, .events = POLLIN};
    int dead = node.loader < 0 && loader_present();
    if (poll(p, (nfds_t)(2 + working), dead ? 50 : -1) < 0) continue;
    if (p[1].revents || dead) revive();
    for (int i = working - 1; i >= 0; i--)
      if (p[2 + i].revents) ended(i);
    if (!p[0].revents) continue;
    ssize_t n = recv(CONTROL, request, sizeof request, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;              // the edge is gone; sandboxes live on
    if ((size_t)n >= sizeof h) memcpy(&h, request, sizeof h);
    if ((size_t)n < sizeof h || h.zero || h.length != (size_t)n - sizeof h.length) {
      fprintf(stderr, "launcher: a malformed message of %zd bytes on the control socket\n", n);
      return 1;
    }
    serve(&h, (size_t)n - sizeof h);
  }
}

int launcher_main(int argc, char **argv) {
  static const struct option options[] = {{"run", 1, NULL, 'r'}, {"state", 1, NULL, 's'}, {"cgroup", 1, NULL, 'c'},
                                          {"seccomp", 1, NULL, 'f'}, {"join", 1, NULL, 'j'}, {"core", 1, NULL, 'k'}, {"idle-by", 1, NULL, 'i'},
                                          {"fill-ms", 1, NULL, 'd'}, {"fill-by", 1, NULL, 'b'}, {"criu", 1, NULL, 'm'}, {"zygote-seccomp", 1, NULL, 'z'}, {0}};
  const char *filter = NULL, *zygote = NULL, *criu = NULL;
  pid_t join = 0, cores[CPU_CLASSES] = {0};
  node.title = argv[0];
  node.title_size = (size_t)(argv[argc - 1] + strlen(argv[argc - 1]) - argv[0]);
  optind = 2;
  for (int o; (o = getopt_long(argc, argv, "", options, NULL)) > 0;) switch (o) {
    case 'r': node.run = optarg; break;
    case 's': node.state = optarg; break;
    case 'c': node.cgroup = optarg; break;
    case 'f': filter = optarg; break;
    case 'j': join = (pid_t)atoi(optarg); break;
    case 'k': if (sscanf(optarg, "%d,%d", &cores[CPU_LATENCY], &cores[CPU_BEST_EFFORT]) != 2) return 2; break;
    case 'i': node.idle_by = !strcmp(optarg, "policy") ? IDLE_BY_POLICY : IDLE_BY_GROUP; break;
    case 'b': node.fill_by = !strcmp(optarg, "fuse") ? FILL_FUSE : !strcmp(optarg, "fanotify") ? FILL_FANOTIFY : FILL_AUTO; break;
    case 'm': criu = optarg; break;
    case 'z': zygote = optarg; break;
    case 'd': node.fill_ms = strtoull(optarg, NULL, 10); break;
    default: return 2;
  }
  if (!node.run || *node.run != '/' || !node.state || *node.state != '/' || !node.cgroup || !*node.cgroup || strchr(node.cgroup, '/') || !filter || optind < argc) {
    fprintf(stderr, "launcher: --run DIR --state DIR (absolute), --cgroup NAME and --seccomp FILE are needed\n");
    return 2;
  }
  struct fault f = {0};
  if (prepare(filter, zygote, criu, join, cores, argv, &f)) {
    fprintf(stderr, "launcher: %s\n", f.message);
    answer(F_ERROR, 0, &f);
    return 1;
  }
  return loop();
}
