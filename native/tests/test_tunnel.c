// CONNECT on the plain host: bytes both ways, each side's end, backlogs, and what a port said before it broke.
#include "host_sandbox.c"
#include "client.c"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>

#define LARGE (3u << 20)
static char dir[] = "/tmp/aether-unit-XXXXXX";
static uint8_t all[LARGE], back[LARGE];

static pid_t serve(void) {
  pid_t pid = fork();
  if (pid) return pid;
  prctl(PR_SET_PDEATHSIG, SIGTERM);    // a test that fails leaves nothing
  static struct sandbox s;
  host_sandbox(&s, dir);
  aether_main(&s);
}

static int listening(int six, uint16_t *port) {
  struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM, 0), on = 1;
  socklen_t n = six ? sizeof a6 : sizeof a4;
  struct sockaddr *a = six ? (void *)&a6 : (void *)&a4;
  if (six) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  CHECK(!bind(fd, a, n) && !listen(fd, 16) && !getsockname(fd, a, &n));
  *port = ntohs(six ? a6.sin6_port : a4.sin_port);
  return fd;
}

static int ask(uint64_t port) {
  int fd = client(dir);
  begin(F_CONNECT);
  frame_u64(&out, T_PORT, port);
  finish(fd);
  return fd;
}

static int far_end(int listener) {
  int fd = accept(listener, NULL, NULL);
  CHECK(fd >= 0);
  return fd;
}

static void all_of(int fd, size_t n) {
  for (size_t done = 0; done < n;) {
    ssize_t r = recv(fd, back + done, n - done, 0);
    CHECK(r > 0);
    done += (size_t)r;
  }
  CHECK(!memcmp(all, back, n));
}

// n bytes, by a process of their own: the other side may wait for us
static pid_t sending(int fd, size_t n) {
  pid_t pid = fork();
  if (pid) return pid;
  for (size_t done = 0; done < n;) {
    ssize_t r = send(fd, all + done, n - done, MSG_NOSIGNAL);
    if (r <= 0) _exit(1);
    done += (size_t)r;
  }
  _exit(0);
}

static void sent(pid_t pid) {
  int status;
  CHECK(waitpid(pid, &status, 0) == pid && !status);
}

static void test_bytes(void) {
  for (int six = 0; six < 2; six++) {
    uint16_t port;
    int listener = listening(six, &port), near = ask(port), far = far_end(listener);
    CHECK(get(near) == F_OK);
    pid_t pid = sending(near, LARGE);
    all_of(far, LARGE);
    sent(pid);
    pid = sending(far, LARGE);
    all_of(near, LARGE);
    sent(pid);
    CHECK(!shutdown(near, SHUT_WR) && recv(far, back, 1, 0) == 0);
    CHECK(send(far, all, 1000, 0) == 1000);                        // the other half goes on
    all_of(near, 1000);
    close(far);
    CHECK(recv(near, back, 1, 0) == 0);
    close(near);
    close(listener);
  }
}

static void test_refused(void) {
  uint16_t port;
  close(listening(0, &port));
  int fd = ask(port);
  CHECK(get(fd) == F_ERROR && code_is("port_closed") && get(fd) == -1);
  close(fd);
  static const uint64_t wrong[] = {0, 65536, UINT64_MAX};
  for (size_t i = 0; i < 3; i++) {
    fd = ask(wrong[i]);
    CHECK(get(fd) == F_ERROR && code_is("invalid_request"));
    close(fd);
  }
}

// It answers and closes without having read what it was sent: a reset, but its answer arrives.
static void test_early_answer(void) {
  uint16_t port;
  int listener = listening(0, &port);
  for (int i = 0; i < 50; i++) {
    int near = ask(port), far = far_end(listener);
    CHECK(get(near) == F_OK);
    CHECK(send(near, all, 100000, 0) == 100000);
    while (recv(far, back, 1, MSG_PEEK) != 1) {}
    CHECK(send(far, all, 5000, 0) == 5000);
    close(far);
    pid_t pid = sending(near, 1000000);
    all_of(near, 5000);
    CHECK(recv(near, back, 1, 0) == 0);
    sent(pid);                         // and what was still sent to it went nowhere
    close(near);
  }
  close(listener);
}

static void test_many(void) {
  uint16_t port;
  int listener = listening(0, &port), near[256], far[256];
  for (int i = 0; i < 256; i++) {
    near[i] = ask(port);
    far[i] = far_end(listener);
    CHECK(get(near[i]) == F_OK);
  }
  int one_more = ask(port);
  CHECK(get(one_more) == F_ERROR && code_is("resource_exhausted"));
  close(one_more);
  for (int i = 0; i < 256; i++) {
    CHECK(send(near[i], all, 10, 0) == 10);
    all_of(far[i], 10);
    close(i % 2 ? near[i] : far[i]);
    CHECK(recv(i % 2 ? far[i] : near[i], back, 1, 0) <= 0);
    close(i % 2 ? far[i] : near[i]);
  }
  for (int tries = 0;; tries++) {      // they are gone
    int fd = ask(port), type = get(fd);
    close(fd);
    if (type == F_OK) break;
    CHECK(tries < 100);
    usleep(20000);
  }
  close(listener);
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  host_init();
  signal(SIGPIPE, SIG_IGN);
  CHECK(mkdtemp(dir));
  for (size_t i = 0; i < LARGE; i++) all[i] = (uint8_t)(i * 31 + i / 257);
  pid_t pid = serve();
  char path[160];
  snprintf(path, sizeof path, "%s/aether.sock", dir);
  while (access(path, 0)) usleep(1000);
  usleep(20000);
  test_bytes();
  test_refused();
  test_early_answer();
  test_many();
  int fd = client(dir);
  begin(F_STOP);
  finish(fd);
  CHECK(get(fd) == F_ENDED);
  close(fd);
  waitpid(pid, NULL, 0);
  snprintf(path, sizeof path, "rm -rf %s", dir);
  printf("  tunnels ok\n");
  return system(path);
}
