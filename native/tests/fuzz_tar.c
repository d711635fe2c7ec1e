// Fuzzer entry of the tar reader and of extraction: one input is an archive. It is read to its end, then unpacked into a directory, and
// nothing may have changed beside that. libFuzzer calls LLVMFuzzerTestOneInput; test_tar.c drives it where there is no clang.
#include "../tar.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char fuzz_dir[] = "/dev/shm/tar-fuzz-XXXXXX";
static int top = -1;
static struct stat outside_was;

struct memory { const uint8_t *p; size_t n, at, step; };

static int memory_peek(void *arg, const uint8_t **p, size_t *n) {
  struct memory *m = arg;
  *p = m->p + m->at;
  *n = m->n - m->at < m->step ? m->n - m->at : m->step;
  return *n != 0;
}

static void memory_eat(void *arg, size_t n) { ((struct memory *)arg)->at += n; }

static void check(int ok, const char *what) {
  if (ok) return;
  fprintf(stderr, "fuzz_tar: %s\n", what);
  abort();
}

void fuzz_read(const uint8_t *data, size_t size, size_t step) {
  struct memory m = {data, size, 0, step};
  struct tar t = {.peek = memory_peek, .eat = memory_eat, .arg = &m};
  const uint8_t *p, *value;
  size_t n;
  uint64_t at;
  char name[256];
  int r;
  while ((r = tar_next(&t)) > 0) {
    check(t.entry.name && *t.entry.name && t.entry.link && strchr("0123456", t.entry.type), "an entry without a name or with a type of its own");
    check(t.entry.mode <= 07777 && t.entry.nsec < 1000000000, "a mode or a time out of range");
    while (tar_xattr(&t, name, &value, &n)) check(!strncmp(name, "user.", 5) && (!n || value), "an attribute that is not the user's");
    uint64_t end = 0;
    int more;
    while ((more = tar_data(&t, &p, &n, &at)) > 0) {
      check(n && at >= end && at + n <= t.entry.size, "data outside of its file");
      end = at + n;
      tar_eat(&t, n);
    }
    if (more < 0) break;
  }
  if (r < 0) check(t.error[0], "an error without a text");
  tar_free(&t);
}

static void fuzz_setup(void) {
  struct rlimit small = {1 << 20, 1 << 20};
  if (!geteuid() && (setgid(65534) || setuid(65534))) abort();  // no devices, no owners
  check(mkdtemp(fuzz_dir) && (top = open(fuzz_dir, O_RDONLY | O_DIRECTORY)) >= 0, "no directory to unpack into");
  check(!mkdirat(top, "outside", 0700) && !mkdirat(top, "outside/secret", 0700), "no directory beside it");
  check(!fstatat(top, "outside", &outside_was, 0), "no directory beside it");
  signal(SIGXFSZ, SIG_IGN);            // as file_serve() has it
  setrlimit(RLIMIT_FSIZE, &small);
}

void fuzz_unpack(const uint8_t *data, size_t size) {
  static uint8_t *space;
  struct stat st;
  if (top < 0) fuzz_setup();
  if (!space) space = malloc(1 << 20);
  if (!space || size > 1 << 20) return;
  memcpy(space, data, size);
  struct job j = {.conn = -1, .in = space, .in_end = size, .a.path = "/fuzz"};
  check(!mkdirat(top, "in", 0700) && !symlinkat("../outside", top, "in/pre") && !mkdirat(top, "in/d", 0700), "no directory to unpack into");
  int root = openat(top, "in", O_PATH | O_DIRECTORY);
  if (unpack(&j, root, 1, 0)) check(j.code && j.message[0], "an error without a text");
  close(root);
  j.code = NULL;
  fchmodat(top, "in", 0700, 0);
  check(!fstatat(top, "outside", &st, 0) && st.st_mtim.tv_nsec == outside_was.st_mtim.tv_nsec && st.st_ctim.tv_nsec == outside_was.st_ctim.tv_nsec, "something changed outside");
  if (remove_tree(&j, top, "in", "in")) {                        // directories closed to us by the archive's modes
    char command[64];
    snprintf(command, sizeof command, "chmod -R u+rwx %s/in", fuzz_dir);
    check(!system(command) && !remove_tree(&j, top, "in", "in"), "what was unpacked cannot be removed");
  }
}

void fuzz_end(void) {
  struct job j = {0};
  if (top < 0) return;
  remove_tree(&j, top, "outside", "outside");
  close(top);
  rmdir(fuzz_dir);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_read(data, size, 1 + size % 700);
  fuzz_unpack(data, size);
  return 0;
}
