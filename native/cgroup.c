// Control groups of a sandbox: limits in v1 hierarchies where the controllers live there, else in v2; the v2 group always exists, for
// killing, freezing and CLONE_INTO_CGROUP. Directories are kept as descriptors, so that no cgroup mount is needed in our namespace.
#include "node.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "machine.h"
#include "util.h"

#define SOCKETS_LEAST (8u << 20)         // bytes that the sockets of a small sandbox may hold
#define IDLE_SUFFIX "-idle"
#define LEAST_NICE 19
#ifndef SCHED_IDLE
#define SCHED_IDLE 5
#endif

static const char *const controller[CG_COUNT] = {"memory", "pids", "cpu"};

static int has_word(const char *list, const char *word, char separator) {
  size_t n = strlen(word);
  for (const char *p = list; p; p = strchr(p, separator)) {
    if (*p == separator) p++;
    if (!strncmp(p, word, n) && (!p[n] || p[n] == separator || p[n] == '\n')) return 1;
  }
  return 0;
}

// Best effort has a parent of its own beside everything else of the host: how a group yields is a matter between it and its siblings.
static int own_directory(const char *mount, int class, struct fault *f) {
  char path[4200];
  snprintf(path, sizeof path, "%s/%s%s", mount, node.cgroup, class == CPU_BEST_EFFORT ? IDLE_SUFFIX : "");
  if (mkdir(path, 0755) && errno != EEXIST) return fault_host(f, errno, "make the cgroup %s", path);
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fd < 0 ? fault_host(f, errno, "open the cgroup %s", path) : fd;
}

// Controllers must be switched on in every group from the root down to ours, so that the groups of sandboxes get them.
static int enable(const char *mount, struct fault *f) {
  const char *const below[] = {"", "/", "/"}, *const name[] = {"", node.cgroup, node.cgroup}, *const suffix[] = {"", "", IDLE_SUFFIX};
  char path[4200];
  for (int at = 0; at < 3; at++)
    for (int i = 0; i < CG_COUNT; i++) {
      char word[16];
      if (node.v1[0][i] >= 0) continue;
      snprintf(path, sizeof path, "%s%s%s%s/cgroup.subtree_control", mount, below[at], name[at], suffix[at]);
      snprintf(word, sizeof word, "+%s", controller[i]);
      if (write_at(AT_FDCWD, path, word)) return fault_set(f, "internal", errno, "enable the %s controller in %s", controller[i], path);
    }
  return 0;
}

static int limit(int dir, const char *file, const char *text, struct fault *f) {
  return write_at(dir, file, text) ? fault_host(f, errno, "write %s to the cgroup's %s", text, file) : 0;
}

// The parent of best effort yields to every other group and task of the host. A kernel before 5.15 has no cpu.idle: then its tasks run
// under SCHED_IDLE, which others preempt at once, and the parent has the least weight, for a group's weight is not that of its tasks.
static int yield_to_all(struct fault *f) {
  int v1 = node.v1[CPU_BEST_EFFORT][CG_CPU], dir = v1 >= 0 ? v1 : node.v2[CPU_BEST_EFFORT];
  int by_policy = node.idle_by == IDLE_BY_POLICY;
  if (!write_at(dir, "cpu.idle", by_policy ? "0" : "1")) {
    if (!by_policy) return 0;
  } else if (errno != ENOENT) return fault_host(f, errno, "write to cpu.idle of %s" IDLE_SUFFIX, node.cgroup);
  node.idle_by = IDLE_BY_POLICY;
  return limit(dir, v1 >= 0 ? "cpu.shares" : "cpu.weight", v1 >= 0 ? "2" : "1", f);
}

// A hierarchy has one place for a process: all its controllers go where the cpu controller is.
static int open_v1(const char *point, const char *options, struct fault *f) {
  int dirs[CPU_CLASSES] = {-1, -1};
  if (has_word(options, "cpuacct", ',') && node.cpuacct < 0 && (node.cpuacct = own_directory(point, CPU_LATENCY, f)) < 0) return -1;
  for (int i = 0; i < CG_COUNT; i++) {
    if (node.v1[0][i] >= 0 || !has_word(options, controller[i], ',')) continue;
    if (dirs[0] < 0 && (dirs[0] = own_directory(point, CPU_LATENCY, f)) < 0) return -1;
    if (dirs[1] < 0 && (dirs[1] = has_word(options, controller[CG_CPU], ',') ? own_directory(point, CPU_BEST_EFFORT, f) : dirs[0]) < 0) return -1;
    for (int class = 0; class < CPU_CLASSES; class++) node.v1[class][i] = dirs[class];
  }
  return 0;
}

int cgroup_open(struct fault *f) {
  char line[8192], unified[4096] = "";
  for (int class = 0; class < CPU_CLASSES; class++) {
    node.v2[class] = -1;
    for (int i = 0; i < CG_COUNT; i++) node.v1[class][i] = -1;
  }
  node.cpuacct = -1;
  FILE *m = fopen("/proc/self/mountinfo", "re");
  if (!m) return fault_host(f, errno, "open /proc/self/mountinfo");
  while (fgets(line, sizeof line, m)) {
    char point[4096], type[64], options[2048];
    char *dash = strstr(line, " - ");
    if (!dash || sscanf(line, "%*s %*s %*s %*s %4095s", point) != 1 || sscanf(dash, " - %63s %*s %2047s", type, options) != 2) continue;
    if (!strcmp(type, "cgroup2") && !*unified) snprintf(unified, sizeof unified, "%s", point);
    if (!strcmp(type, "cgroup") && open_v1(point, options, f)) { fclose(m); return -1; }
  }
  fclose(m);
  if (!*unified) return fault_set(f, "internal", 0, "no cgroup v2 tree is mounted on this host");
  for (int i = 0; i < CG_COUNT; i++) {
    char path[4200], have[512];
    snprintf(path, sizeof path, "%s/cgroup.controllers", unified);
    if (node.v1[0][i] < 0 && (read_at(AT_FDCWD, path, have, sizeof have) < 0 || !has_word(have, controller[i], ' ')))
      return fault_set(f, "internal", 0, "the %s controller is neither in cgroup v1 nor in %s", controller[i], unified);
  }
  int pids = node.v1[CPU_LATENCY][CG_PIDS], memory = node.v1[CPU_LATENCY][CG_MEMORY];
  // so that /proc/<pid>/cgroup of a program that has not yet joined its own pids group names nothing inside
  if (pids >= 0 && write_at(pids, "tasks", "0")) return fault_host(f, errno, "join the pids cgroup %s", node.cgroup);
  // the first group with this limit, and the end of the last, patch the kernel's code: hold it on for all
  if (memory >= 0) write_at(memory, "memory.kmem.tcp.limit_in_bytes", "9223372036854771712");
  // apart also where v2 has no controller: its counters then tell the classes apart
  for (int class = 0; class < CPU_CLASSES; class++)
    if ((node.v2[class] = own_directory(unified, class, f)) < 0) return -1;
  return enable(unified, f) || yield_to_all(f) ? -1 : 0;
}

static int group(int parent, const char *id, const char *what, struct fault *f) {
  if (mkdirat(parent, id, 0755)) return fault_lack(f, "cgroups", errno, "make the %s cgroup %s/%s", what, node.cgroup, id);
  int fd = openat(parent, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fd < 0 ? fault_host(f, errno, "open the %s cgroup %s/%s", what, node.cgroup, id) : fd;
}

static int limits(struct sandbox *s, struct fault *f) {
  const struct spec *c = &s->spec;
  const struct box *b = s->box;
  char text[64], sockets[32];
  if (c->memory_bytes) {
    snprintf(text, sizeof text, "%llu", (unsigned long long)c->memory_bytes);
    if (b->v1[CG_MEMORY] >= 0) {
      if (limit(b->v1[CG_MEMORY], "memory.limit_in_bytes", text, f)) return -1;
      // v1 counts what sockets hold apart, and only if it is limited
      snprintf(sockets, sizeof sockets, "%llu", (unsigned long long)(c->memory_bytes / 4 > SOCKETS_LEAST ? c->memory_bytes / 4 : SOCKETS_LEAST));
      if (write_at(b->v1[CG_MEMORY], "memory.kmem.tcp.limit_in_bytes", sockets) && errno != ENOENT)
        return fault_host(f, errno, "write %s to the cgroup's memory.kmem.tcp.limit_in_bytes", sockets);
      // absent where the kernel does not account swap
      if (write_at(b->v1[CG_MEMORY], "memory.memsw.limit_in_bytes", text) && errno != ENOENT)
        return fault_host(f, errno, "write %s to the cgroup's memory.memsw.limit_in_bytes", text);
    } else {
      if (limit(s->cgroup_fd, "memory.max", text, f)) return -1;
      if (write_at(s->cgroup_fd, "memory.swap.max", "0") && errno != ENOENT) return fault_host(f, errno, "write to memory.swap.max");
    }
  }
  if (c->pids) {
    snprintf(text, sizeof text, "%u", c->pids);
    if (limit(b->v1[CG_PIDS] >= 0 ? b->v1[CG_PIDS] : s->cgroup_fd, "pids.max", text, f)) return -1;
  }
  if (c->cpu_milli) {
    unsigned long quota = c->cpu_milli < 10 ? 1000 : c->cpu_milli * 100ul;      // of a period of 100 ms; the kernel's least is 1 ms
    int v1 = b->v1[CG_CPU] >= 0, dir = v1 ? b->v1[CG_CPU] : s->cgroup_fd;
    snprintf(text, sizeof text, v1 ? "%lu" : "%lu 100000", quota);
    if (limit(dir, v1 ? "cpu.cfs_quota_us" : "cpu.max", text, f)) return -1;
    // what it has of the CPU beside others of its class; one core is what a group has anyway
    unsigned long one = v1 ? 1024 : 100, most = v1 ? 262144 : 10000, least = v1 ? 2 : 1;
    unsigned long weight = c->cpu_milli * one / 1000;
    snprintf(text, sizeof text, "%lu", weight < least ? least : weight > most ? most : weight);
    if (weight != one && limit(dir, v1 ? "cpu.shares" : "cpu.weight", text, f)) return -1;
  }
  return 0;
}

static int watch_oom(struct sandbox *s, struct fault *f) {
  const struct box *b = s->box;
  if (b->v1[CG_MEMORY] >= 0) {
    char text[32];
    int control = openat(b->v1[CG_MEMORY], "memory.oom_control", O_RDONLY | O_CLOEXEC);
    s->oom_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    snprintf(text, sizeof text, "%d %d", s->oom_fd, control);
    int bad = control < 0 || s->oom_fd < 0 || write_at(b->v1[CG_MEMORY], "cgroup.event_control", text);
    int err = errno;
    close_fd(&control);
    return bad ? fault_host(f, err, "watch the memory cgroup of %s for OOM", s->spec.id) : 0;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d/memory.events", s->cgroup_fd);
  s->oom_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  if (s->oom_fd < 0 || inotify_add_watch(s->oom_fd, path, IN_MODIFY) < 0)
    return fault_lack(f, "inotify", errno, "watch memory.events of %s", s->spec.id);
  return 0;
}

int cgroup_make(struct sandbox *s, struct fault *f) {
  s->cgroup_fd = group(node.v2[s->spec.cpu_class], s->spec.id, "v2", f);
  return s->cgroup_fd < 0 ? -1 : 0;
}

int cgroup_groups(struct sandbox *s, struct fault *f) {
  struct box *b = s->box;
  const char *id = s->spec.id;
  const int *parents = node.v1[s->spec.cpu_class];
  for (int i = 0; i < CG_COUNT; i++) {
    if (parents[i] < 0) continue;
    // two controllers of one hierarchy share a directory
    if ((b->v1[i] = openat(parents[i], id, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) >= 0) continue;
    if ((b->v1[i] = group(parents[i], id, controller[i], f)) < 0) return -1;
    // "0" to tasks moves the writer alone, which skips the lock that cgroup.procs takes over every fork and exit of the host (a
    // grace period: milliseconds); who joins has one thread
    if ((b->join[i] = openat(b->v1[i], "tasks", O_WRONLY | O_CLOEXEC)) < 0)
      return fault_host(f, errno, "open the %s cgroup's tasks of %s", controller[i], id);
  }
  return 0;
}

int cgroup_limit(struct sandbox *s, struct fault *f) { return cgroup_groups(s, f) || limits(s, f) || watch_oom(s, f) ? -1 : 0; }

int cgroup_bound(struct sandbox *s, struct fault *f) { return limits(s, f); }

int cgroup_join(const struct spec *spec, struct fault *f) {
  const int *parents = node.v1[spec->cpu_class];
  char path[300];
  snprintf(path, sizeof path, "%s/tasks", spec->id);
  for (int i = 0; i < CG_COUNT; i++)
    if (parents[i] >= 0 && write_at(parents[i], path, "0")) return fault_host(f, errno, "join the %s cgroup of %s", controller[i], spec->id);
  return 0;
}

// The output of best effort is not work that others wait for either; but a kill must come while they use all of the CPU.
void class_supervise(const struct spec *spec) {
  if (spec->cpu_class != CPU_BEST_EFFORT) return;
  setpriority(PRIO_PROCESS, 0, LEAST_NICE);
  write_at(AT_FDCWD, "/proc/self/autogroup", "19");      // where the kernel groups by session, that is what counts
}

int class_take(const struct spec *spec, struct fault *f) {
  const struct sched_param none = {0};
  if (spec->cpu_class != CPU_BEST_EFFORT) return 0;
  setpriority(PRIO_PROCESS, 0, 0);     // its supervisor's is not what a program expects; it matters little beside others with the same
  if (node.idle_by == IDLE_BY_GROUP || !sched_setscheduler(0, SCHED_IDLE, &none)) return 0;
  return fault_host(f, errno, "let a process of %s yield to all others", spec->id);
}

void class_give(const struct spec *spec, pid_t thread) {
  const struct sched_param none = {0};
  if (node.idle_by == IDLE_BY_POLICY) sched_setscheduler(thread, spec->cpu_class == CPU_BEST_EFFORT ? SCHED_IDLE : SCHED_OTHER, &none);
}

#define ON_ITS_WAY (256u << 10)

// A page that is being written to swap is freed by the first reclaim after that, and reclaim does not wait for the device.
void cgroup_reclaim(struct sandbox *s) {
  int v1 = s->box->v1[CG_MEMORY], dir = v1 >= 0 ? v1 : s->cgroup_fd;
  char text[32];
  for (uint64_t used = 0, cached = 0;; nap_us(100000)) {
    if (v1 >= 0) write_at(v1, "memory.force_empty", "0");
    else if (!read_u64(dir, "memory.current", &used)) {
      snprintf(text, sizeof text, "%llu", (unsigned long long)used);
      write_at(dir, "memory.reclaim", text);             // EAGAIN: it gave back less than that
    }
    if (read_key(dir, "memory.stat", "swapcached", &cached) || cached < ON_ITS_WAY) return;
  }
}

// v1 counts what is swapped out against the same limit. v2 counts it apart: a sandbox that runs may not have it instead of memory.
void cgroup_swap(struct sandbox *s, int on) {
  char text[32];
  if (s->box->v1[CG_MEMORY] >= 0 || !s->spec.memory_bytes) return;
  snprintf(text, sizeof text, "%llu", on ? (unsigned long long)s->spec.memory_bytes : 0ull);
  write_at(s->cgroup_fd, "memory.swap.max", text);
}

void cgroup_kill(int v2) { write_at(v2, "cgroup.kill", "1"); }

static void remove_children(int dir) {
  int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  if (!d) { close_fd(&copy); return; }
  for (struct dirent *e; (e = readdir(d));)
    if (e->d_type == DT_DIR && e->d_name[0] != '.') unlinkat(dir, e->d_name, AT_REMOVEDIR);
  closedir(d);
}

// A group is busy for a moment after its last process was reaped; a killed process may also take a while to die.
#define REMOVE_TRIES 400
static int remove_group(int parent, const char *id, int v2) {
  for (int i = 0; parent >= 0; i++) {
    if (!unlinkat(parent, id, AT_REMOVEDIR) || errno == ENOENT) return 0;
    if (errno != EBUSY || i == REMOVE_TRIES) return -1;
    int dir = openat(parent, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0 && v2) {
      uint64_t alive = 1;
      read_key(dir, "cgroup.events", "populated", &alive);
      if (alive) cgroup_kill(dir);
      else remove_children(dir);
      if (!alive && !unlinkat(parent, id, AT_REMOVEDIR)) { close(dir); return 0; }
    }
    close_fd(&dir);
    nap_us(i < 20 ? 100 : 10000);
  }
  return 0;
}

int cgroup_remove(const char *id) {
  int err = 0;
  for (int class = 0; class < CPU_CLASSES; class++) {   // whoever removes what others left does not know which
    if (remove_group(node.v2[class], id, 1)) err = errno;
    for (int i = 0; i < CG_COUNT; i++)
      if (remove_group(node.v1[class][i], id, 0)) err = errno;
  }
  if (remove_group(node.cpuacct, id, 0)) err = errno;
  errno = err;
  return err ? -1 : 0;
}

int cgroup_pids_full(struct sandbox *s, int starting) {
  uint64_t now;
  int dir = s->box->v1[CG_PIDS] >= 0 ? s->box->v1[CG_PIDS] : s->cgroup_fd;
  if (s->box->join[CG_PIDS] < 0) starting = 0;           // they are in the group already
  return s->spec.pids && !read_u64(dir, "pids.current", &now) && now + (uint64_t)starting >= s->spec.pids;
}

uint64_t sandbox_oom_kills(struct sandbox *s) {
  uint64_t n = 0;
  if (s->channel > 0) return machine_known()->oom_kills;
  if (s->box->v1[CG_MEMORY] >= 0) read_key(s->box->v1[CG_MEMORY], "memory.oom_control", "oom_kill", &n);
  else read_key(s->cgroup_fd, "memory.events", "oom_kill", &n);
  return n;
}

uint64_t sandbox_pids_hits(struct sandbox *s) {
  uint64_t n = 0;
  if (s->channel > 0) return machine_known()->pids_hits;
  read_key(s->box->v1[CG_PIDS] >= 0 ? s->box->v1[CG_PIDS] : s->cgroup_fd, "pids.events", "max", &n);
  return n;
}

void cgroup_usage(struct sandbox *s, struct usage *u) {
  int m = s->box->v1[CG_MEMORY], p = s->box->v1[CG_PIDS];
  read_u64(m >= 0 ? m : s->cgroup_fd, m >= 0 ? "memory.usage_in_bytes" : "memory.current", &u->memory);
  read_u64(m >= 0 ? m : s->cgroup_fd, m >= 0 ? "memory.max_usage_in_bytes" : "memory.peak", &u->memory_peak);
  if (m < 0) read_u64(s->cgroup_fd, "memory.swap.current", &u->swap);
  else if (!read_u64(m, "memory.memsw.usage_in_bytes", &u->swap)) u->swap = u->swap > u->memory ? u->swap - u->memory : 0;
  if (!read_key(s->cgroup_fd, "cpu.stat", "usage_usec", &u->cpu_ns)) u->cpu_ns *= 1000;
  read_u64(p >= 0 ? p : s->cgroup_fd, "pids.current", &u->pids);
  u->oom_kills = sandbox_oom_kills(s);
  u->pids_hits = sandbox_pids_hits(s);
}
