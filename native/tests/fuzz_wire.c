// Fuzzer entry of aether's side of the wire: one input is a sequence of frames on one connection, through the real reader, decoder and
// handlers, on a sandbox that lets nothing enter. libFuzzer calls LLVMFuzzerTestOneInput; test_fuzz.c drives it where there is no clang.
#include "../aether.h"
#include "../node.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include "no_criu.c"

static struct sandbox box;
static int ended;
static char fuzz_dir[] = "/tmp/aether-fuzz-XXXXXX";

void sandbox_kill(struct sandbox *s) { (void)s; ended++; }
void sandbox_remove(struct sandbox *s) { (void)s; }
void sandbox_rest(struct sandbox *s) { (void)s; }
void sandbox_usage(struct sandbox *s, struct usage *u) { (void)s; *u = (struct usage){0}; }
uint64_t sandbox_oom_kills(struct sandbox *s) { (void)s; return 0; }
uint64_t sandbox_pids_hits(struct sandbox *s) { (void)s; return 0; }
int sandbox_disk_full(struct sandbox *s) { (void)s; return 0; }
int medium_snapshot(struct sandbox *s, const char *name, struct fault *f) { (void)s; (void)name; f->code = "internal"; return -1; }
void cgroup_usage(struct sandbox *s, struct usage *u) { (void)s; (void)u; }
void cgroup_swap(struct sandbox *s, int on) { (void)s; (void)on; }
void cgroup_reclaim(struct sandbox *s) { (void)s; }
int medium_remove(const char *name) { (void)name; return 0; }
int snapshot_named(const char *name) { return strchr(name, '.') != NULL; }
int sandbox_shell_replaced(struct sandbox *s) { (void)s; return 0; }
int sandbox_rename(struct sandbox *s, const char *hostname, struct fault *f) {
  if (*hostname == 'b') { f->code = "invalid_request"; return -1; }
  s->spec.hostname = hostname;
  return 0;
}
int sandbox_enter(struct sandbox *s, const struct entry *e, struct start *st, struct fault *f) {
  (void)s; (void)st;
  if (e->argv) for (const char *const *p = e->argv; *p; p++) (void)strlen(*p);   // every text must be one
  if (e->env) for (const char *const *p = e->env; *p; p++) (void)strlen(*p);
  *f = (struct fault){.code = "internal", .message = "nothing enters"};
  return -1;
}
int sandbox_pty(struct sandbox *s, int rows, int cols, int *slave, struct fault *f) {
  (void)s; (void)slave;
  snprintf(f->message, sizeof f->message, "no terminal of %dx%d", rows, cols);
  f->code = "internal";
  return -1;
}

static int listening(void) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s/s", fuzz_dir);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 8)) abort();
  return fd;
}

static void setup_once(void) {
  static int done;
  if (done++) return;
  if (!mkdtemp(fuzz_dir)) abort();
  int dir = open(fuzz_dir, O_RDONLY | O_DIRECTORY);
  box.cgroup_fd = dir;
  box.init = getpid();                                   // who lives: else the first program that cannot start is the end of all
  box.spec.id = "fuzz";
  box.spec.state_dir = fuzz_dir;
  box.spec.log_head = box.spec.log_tail = 100;
  A = (struct aether){.s = &box, .state_dir = dir, .armed = 0 /* no timer */, .epoll = epoll_create1(EPOLL_CLOEXEC)};
  log_setup(dir, 1 << 20);
  if (records_setup(dir) || conn_listen(listening())) abort();
  refresh();
  static const char *ids[] = {"a", "b", "small"};
  for (size_t i = 0; i < 3; i++) {                       // ended commands to ask about
    struct record r = {.ending = END_EXITED, .head = 100, .tail = 100};
    struct log l[2];
    strcpy(r.command, ids[i]);
    for (int k = 0; k < 2; k++) { log_init(&l[k], ids[i], k, 100, 100); log_write(&l[k], fuzz_dir, 10); }
    if (i == 1) for (int k = 0; k < 1000; k++) log_write(&l[0], fuzz_dir, sizeof fuzz_dir);
    if (records_append(&r, &l[0], &l[1])) abort();
    log_close(&l[0]);
    log_close(&l[1]);
  }
}

static void turn(void) {
  struct epoll_event e[16];
  int n = epoll_wait(A.epoll, e, 16, 0);
  for (int i = 0; i < n; i++) {
    struct source *src = e[i].data.ptr;
    if (src->fd >= 0 && src->events) src->on(src, e[i].events);
  }
  conns_pump();
  loop_collect();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  setup_once();
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s/s", fuzz_dir);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (connect(fd, (struct sockaddr *)&a, sizeof a)) abort();
  static const uint8_t hello[44] = {40, 0, 0, 0, F_HELLO, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, WIRE_MAJOR, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 8};
  if (size && data[0] & 7 && write(fd, hello, sizeof hello) < 0) abort();         // most inputs get past the greeting
  uint8_t *sent = malloc(size + 1);
  memcpy(sent, data, size);
  for (size_t at = 1; at + 12 <= size;) {                // STOP ends the process, RECLAIM makes one: they are another request here
    uint32_t length;
    memcpy(&length, sent + at, 4);
    if (sent[at + 4] == F_STOP || sent[at + 4] == F_LEAVE || sent[at + 4] == F_RECLAIM) sent[at + 4] = F_STAT;
    if (length > size) break;
    at += 4 + (size_t)length;
  }
  for (size_t at = 1; at < size;) {
    ssize_t n = send(fd, sent + at, size - at, MSG_NOSIGNAL);
    if (n > 0) at += (size_t)n;
    else if (n < 0 && errno != EAGAIN) break;
    turn();
    uint8_t drop[65536];
    while (recv(fd, drop, sizeof drop, 0) > 0) {}
  }
  for (int i = 0; i < 40; i++) {
    turn();
    uint8_t drop[65536];
    while (recv(fd, drop, sizeof drop, 0) > 0) {}
  }
  free(sent);
  close(fd);
  for (int i = 0; i < 3; i++) turn();
  if (ended) abort();
  if (A.conns || A.running) abort();                     // nothing may be left of a client that went
  for (struct command *cmd = A.live; cmd; cmd = cmd->next) abort();
  return 0;
}
