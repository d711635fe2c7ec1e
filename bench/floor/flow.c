// TCP between two namespaces: `sink PORT` takes all that comes, or answers one byte with one; `send ADDRESS PORT MS` prints MB/s;
// `connect ADDRESS PORT N` makes N connections, one byte each way, and prints the median in microseconds.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char block[1 << 20];

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static struct sockaddr_in to(const char *address, const char *port) {
  return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr = {inet_addr(address)}};
}

static int dial(const struct sockaddr_in *a) {
  int s = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(s, (const void *)a, sizeof *a)) { perror("connect"); exit(1); }
  return s;
}

static int ascending(const void *a, const void *b) { return (*(const int64_t *)a > *(const int64_t *)b) - (*(const int64_t *)a < *(const int64_t *)b); }

static int sink(const char *port) {
  struct sockaddr_in a = to("0.0.0.0", port);
  int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(s, (void *)&a, sizeof a) || listen(s, 1024)) { perror("listen"); return 1; }
  signal(SIGCHLD, SIG_IGN);
  puts("ready");
  fflush(stdout);
  for (int c; (c = accept(s, NULL, NULL)) >= 0; close(c)) {
    ssize_t n = read(c, block, sizeof block);
    if (n == 1) { if (write(c, block, 1) != 1) perror("answer"); continue; }
    while (n > 0) n = read(c, block, sizeof block);
  }
  return 0;
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  if (argc == 3 && !strcmp(argv[1], "sink")) return sink(argv[2]);
  if (argc != 5) return 2;
  struct sockaddr_in a = to(argv[2], argv[3]);
  if (!strcmp(argv[1], "send")) {
    int s = dial(&a);
    int64_t from = now(), until = from + atoll(argv[4]) * 1000000, sent = 0;
    for (ssize_t n; now() < until; sent += n)
      if ((n = write(s, block, sizeof block)) < 0) { perror("write"); return 1; }
    printf("%.1f\n", (double)sent * 1e3 / (double)(now() - from));
    return 0;
  }
  int count = atoi(argv[4]);
  int64_t *took = calloc((size_t)count, sizeof *took);
  if (!took || count < 1) return 2;
  for (int i = 0; i < count; i++) {
    int64_t from = now();
    int s = dial(&a);
    if (write(s, "x", 1) != 1 || read(s, block, 1) != 1) { perror("byte"); return 1; }
    took[i] = now() - from;
    close(s);
  }
  qsort(took, (size_t)count, sizeof *took, ascending);
  printf("%.1f\n", (double)took[count / 2] / 1e3);
  return 0;
}
