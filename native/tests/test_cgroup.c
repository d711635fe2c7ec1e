// Where the groups of a sandbox are made and what is written into them, for every kind of host: on trees of plain files that look like the
// kernel's. `test_cgroup DIRECTORY` does it on the kernel's: a v2 tree with the controllers, mounted at DIRECTORY/unified.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

struct node node = {.cgroup = "dsec-test"};
static char top[] = "/tmp/cgroup-XXXXXX", mountinfo[64];
static const char *files;              // that appear in a new group; NULL: the kernel makes them
static int real;
static struct sandbox sandbox;
static struct box box;

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode) {
  return __real_fopen(files && !strcmp(path, "/proc/self/mountinfo") ? mountinfo : path, mode);
}

static void fill(int dir, const char *path) {
  char list[400], name[256];
  snprintf(list, sizeof list, "%s", files);
  for (char *f = strtok(list, " "); f; f = strtok(NULL, " ")) {
    snprintf(name, sizeof name, "%s/%s", path, f);
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    assert(fd >= 0);
    close(fd);
  }
}

int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode) {
  int r = __real_mkdir(path, mode);
  if (!r && files && strstr(path, node.cgroup)) fill(AT_FDCWD, path);
  return r;
}
int __real_mkdirat(int dir, const char *path, mode_t mode);
int __wrap_mkdirat(int dir, const char *path, mode_t mode);
int __wrap_mkdirat(int dir, const char *path, mode_t mode) {
  int r = __real_mkdirat(dir, path, mode);
  if (!r && files) fill(dir, path);
  return r;
}

// What a file of the tree holds, "" when it is empty, "-" when it is not there.
static const char *text(const char *path) {
  static char value[400];
  char at[512];
  snprintf(at, sizeof at, "%s/%s", top, path);
  int fd = open(at, O_RDONLY);
  ssize_t n = fd < 0 ? -1 : read(fd, value, sizeof value - 1);
  if (fd >= 0) close(fd);
  if (n < 0) return "-";
  value[n] = 0;
  value[strcspn(value, "\n")] = 0;
  return value;
}
#define IS(path, wanted) do { if (strcmp(text(path), wanted)) { fprintf(stderr, "%s: %s, not %s\n", path, text(path), wanted); abort(); } } while (0)

static void host(const char *mounts, const char *controllers, const char *appear) {
  char path[100], line[200];
  if (real) return;
  FILE *m = __real_fopen(mountinfo, "w");
  strcpy(top, "/tmp/cgroup-XXXXXX");
  assert(mkdtemp(top) && m);
  char list[200];
  snprintf(list, sizeof list, "%s", mounts);
  for (char *name = strtok(list, " "); name; name = strtok(NULL, " ")) {
    int v2 = !strcmp(name, "unified");
    snprintf(path, sizeof path, "%s/%s", top, name);
    assert(!__real_mkdir(path, 0755));
    fprintf(m, "30 20 0:30 / %s rw - %s none rw%s%s\n", path, v2 ? "cgroup2" : "cgroup", v2 ? "" : ",", v2 ? "" : name);
    if (!v2) continue;
    for (int i = 0; i < 2; i++) {
      snprintf(line, sizeof line, "%s/%s", path, i ? "cgroup.subtree_control" : "cgroup.controllers");
      FILE *f = __real_fopen(line, "w");
      assert(f && fputs(i ? "" : controllers, f) >= 0 && !fclose(f));
    }
  }
  fclose(m);
  files = appear;
}

static void make(const char *id, uint32_t class) {
  struct fault f = {0};
  sandbox = (struct sandbox){.spec = {.id = id, .cpu_class = class, .cpu_milli = 2500, .pids = 9, .memory_bytes = 1 << 26}, .box = &box, .oom_fd = -1};
  for (int i = 0; i < CG_COUNT; i++) box.v1[i] = box.join[i] = -1;
  if (cgroup_open(&f) || cgroup_make(&sandbox, &f) || (cgroup_limit(&sandbox, &f) && strncmp(f.message, "watch", 5))) {
    fprintf(stderr, "%s: %s\n", id, f.message);
    abort();
  }
}

static int policy_inside(void) {       // of a process of the sandbox
  struct fault f = {0};
  int status;
  pid_t pid = fork();
  if (!pid) _exit(class_take(&sandbox.spec, &f) ? 99 : sched_getscheduler(0));
  assert(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
  return WEXITSTATUS(status);
}

#define V1 "tasks memory.limit_in_bytes memory.memsw.limit_in_bytes memory.kmem.tcp.limit_in_bytes cpu.shares cpu.cfs_quota_us pids.max"
#define V2 "cgroup.subtree_control memory.max memory.swap.max pids.max cpu.max cpu.weight memory.events"

static void v1(void) {
  host("memory pids cpu,cpuacct unified", "hugetlb", V1 " cpu.idle");
  make("a", CPU_LATENCY);
  IS("cpu,cpuacct/dsec-test/a/cpu.shares", "2560");
  IS("cpu,cpuacct/dsec-test/a/cpu.cfs_quota_us", "250000");
  IS("cpu,cpuacct/dsec-test/cpu.idle", "");
  IS("unified/dsec-test/a/pids.max", "");
  make("b", CPU_BEST_EFFORT);
  IS("cpu,cpuacct/dsec-test-idle/cpu.idle", "1");
  IS("cpu,cpuacct/dsec-test-idle/cpu.shares", "");
  IS("cpu,cpuacct/dsec-test-idle/b/cpu.shares", "2560");
  IS("cpu,cpuacct/dsec-test-idle/b/cpu.idle", "");
  IS("memory/dsec-test/b/memory.limit_in_bytes", "67108864");            // only where the CPU is shared out do classes matter
  IS("memory/dsec-test-idle/tasks", "-");
  IS("unified/dsec-test-idle/b/tasks", "");
  IS("unified/dsec-test-idle/cgroup.subtree_control", "-");
  assert(policy_inside() == SCHED_OTHER);
}

static void v1_one_hierarchy(void) {
  host("memory,cpu,pids unified", "", V1 " cpu.idle");
  make("b", CPU_BEST_EFFORT);
  IS("memory,cpu,pids/dsec-test-idle/b/memory.limit_in_bytes", "67108864");
  IS("memory,cpu,pids/dsec-test-idle/b/pids.max", "9");
  IS("memory,cpu,pids/dsec-test/b/pids.max", "-");
}

static void v1_old(void) {             // no cpu.idle
  host("memory pids cpu unified", "", V1);
  make("b", CPU_BEST_EFFORT);
  IS("cpu/dsec-test-idle/cpu.shares", "2");
  assert(policy_inside() == SCHED_IDLE);
  make("a", CPU_LATENCY);
  assert(policy_inside() == SCHED_OTHER);
}

static void v2(void) {
  host("unified", "cpuset cpu io memory hugetlb pids", V2 " cpu.idle");
  make("a", CPU_LATENCY);
  IS("unified/dsec-test/a/cpu.weight", "250");
  IS("unified/dsec-test/a/cpu.max", "250000 100000");
  IS("unified/dsec-test/cpu.idle", real ? "0" : "");
  make("b", CPU_BEST_EFFORT);
  IS("unified/dsec-test-idle/cpu.idle", "1");
  IS("unified/dsec-test-idle/b/cpu.weight", "250");
  IS("unified/dsec-test-idle/b/memory.max", "67108864");
  IS("unified/dsec-test/b/memory.max", "-");
  assert(real || !strncmp(text("unified/dsec-test-idle/cgroup.subtree_control"), "+cpu", 4)); // the last of three
  assert(policy_inside() == SCHED_OTHER);
}

static void v2_old(void) {
  host("unified", "cpu memory pids", V2);
  make("b", CPU_BEST_EFFORT);
  IS("unified/dsec-test-idle/cpu.weight", "1");
  assert(policy_inside() == SCHED_IDLE);
}

static pid_t spin(const char *group) {
  char path[200];
  pid_t pid = fork();
  if (pid) return pid;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(0, &one);
  snprintf(path, sizeof path, "%s/%s/cgroup.procs", top, group);
  if (sched_setaffinity(0, sizeof one, &one) || write_at(AT_FDCWD, path, "0")) _exit(1);
  for (;;) {}
}

static uint64_t used_us(const char *group) {
  char path[200];
  uint64_t us = 0;
  snprintf(path, sizeof path, "%s/%s/cpu.stat", top, group);
  assert(!read_key(AT_FDCWD, path, "usage_usec", &us));
  return us;
}

// On one CPU, the latency class has all that it wants, and best effort has what is left.
static void shares_of_a_cpu(void) {
  pid_t pids[] = {spin("unified/dsec-test/a"), spin("unified/dsec-test-idle/b")};
  nap_us(200000);
  uint64_t a = used_us("unified/dsec-test/a"), b = used_us("unified/dsec-test-idle/b");
  nap_us(3000000);
  a = used_us("unified/dsec-test/a") - a;
  b = used_us("unified/dsec-test-idle/b") - b;
  printf("3 s of one CPU: latency %.2f s, best effort %.2f s\n", (double)a / 1e6, (double)b / 1e6);
  assert(a > 10 * b);
  kill(pids[0], SIGKILL);
  assert(waitpid(pids[0], NULL, 0) == pids[0]);
  b = used_us("unified/dsec-test-idle/b");
  nap_us(1000000);
  b = used_us("unified/dsec-test-idle/b") - b;
  printf("1 s alone: best effort %.2f s\n", (double)b / 1e6);
  assert(b > 700000);
  kill(pids[1], SIGKILL);
  assert(waitpid(pids[1], NULL, 0) == pids[1]);
}

static void clean(void) {
  char command[100];
  snprintf(command, sizeof command, "rm -rf %s", top);
  assert(!system(command));
  node.idle_by = IDLE_BY_GROUP;
}

int main(int argc, char **argv) {
  void (*const all[])(void) = {v1, v1_one_hierarchy, v1_old, v2, v2_old};
  if (argc > 1) {
    real = 1;
    snprintf(top, sizeof top, "%s", argv[1]);
    v2();
    shares_of_a_cpu();
    assert(!cgroup_remove("a") && !cgroup_remove("b"));
    return 0;
  }
  snprintf(mountinfo, sizeof mountinfo, "/tmp/mountinfo-%d", getpid());
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    all[i]();
    clean();
  }
  unlink(mountinfo);
  return 0;
}
