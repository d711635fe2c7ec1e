// What a waiting agent's processes hold: BYTES of memory that were written, half of them random and half text, and FILE of as many bytes whose
// pages are in the page cache.
//   hold BYTES FILE               says so on stdout; for each line of stdin it touches all its memory and says in how many microseconds
//   hold serve BYTES FILE SOCKET  the same as a process that a command leaves behind; it does what `step` asks for
//   hold step SOCKET FILE PERCENT MS   one tool call: so much of that memory and of the file is used, and so much CPU time
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char text[] = "def step(state, action):  # one of many lines that an agent's tools keep in memory\n";

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void fill(char *p, size_t n) {
  for (size_t i = 0; i < n / 2;) {
    ssize_t got = getrandom(p + i, n / 2 - i, 0);
    if (got <= 0) _exit(3);
    i += (size_t)got;
  }
  for (size_t i = n / 2; i < n; i++) p[i] = text[i % (sizeof text - 1)];
}

static char block[1 << 16];

static char *hold(size_t n, const char *file) {
  char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  int fd = open(file, O_RDWR | O_CREAT | O_TRUNC, 0644);
  if (p == MAP_FAILED || fd < 0) _exit(3);
  fill(p, n);
  for (size_t i = 0; i < n;) {
    ssize_t put = write(fd, p + i, n - i);
    if (put <= 0) _exit(4);
    i += (size_t)put;
  }
  if (fsync(fd) || lseek(fd, 0, SEEK_SET)) _exit(4);
  while (read(fd, block, sizeof block) > 0) {}
  close(fd);
  return p;
}

static unsigned long touch(const char *p, size_t n) {
  unsigned long sum = 0;
  for (size_t i = 0; i < n; i += 4096) sum += (unsigned char)p[i];
  return sum;
}

static int meet(const char *path, int serve) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  strncpy(a.sun_path, path, sizeof a.sun_path - 1);
  if (serve ? bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 16) : connect(fd, (struct sockaddr *)&a, sizeof a)) _exit(5);
  return fd;
}

static int serve(size_t n, const char *file, const char *path) {
  const char *p = hold(n, file);
  int listener = meet(path, 1);
  pid_t pid = fork();                  // the pages are then this one's alone: its parent is gone
  if (pid) return pid < 0;
  setsid();
  for (int i = 0; i < 3; i++) dup2(open("/dev/null", O_RDWR), i);
  for (;;) {
    int fd = accept(listener, NULL, NULL);
    unsigned percent = 0;
    if (fd < 0 || read(fd, &percent, sizeof percent) != sizeof percent || percent > 100) return 6;
    unsigned long sum = touch(p, n / 100 * percent);
    if (write(fd, &sum, sizeof sum) != sizeof sum) return 6;
    close(fd);
  }
}

static int step(const char *path, const char *file, unsigned percent, double ms) {
  int fd = meet(path, 0), data = open(file, O_RDONLY);
  unsigned long sum;
  if (data < 0 || write(fd, &percent, sizeof percent) != sizeof percent || read(fd, &sum, sizeof sum) != sizeof sum) return 6;
  off_t most = lseek(data, 0, SEEK_END) / 100 * percent;
  lseek(data, 0, SEEK_SET);
  for (off_t i = 0; i < most; i += (off_t)sizeof block)
    if (read(data, block, sizeof block) <= 0) return 6;
  struct timespec t;
  do clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  while ((double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6 < ms);
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 5 && !strcmp(argv[1], "serve")) return serve(strtoull(argv[2], NULL, 10), argv[3], argv[4]);
  if (argc == 6 && !strcmp(argv[1], "step")) return step(argv[2], argv[3], (unsigned)atoi(argv[4]), atof(argv[5]));
  if (argc != 3) return 2;
  size_t n = strtoull(argv[1], NULL, 10);
  const char *p = hold(n, argv[2]);
  char line[64];
  puts("ready");
  fflush(stdout);
  while (fgets(line, sizeof line, stdin)) {
    double began = now();
    unsigned long sum = touch(p, n);
    printf("%.0f %lu\n", now() - began, sum);
    fflush(stdout);
  }
  return 0;
}
