// The file helper behind a plain socket, for tests without a sandbox: file_server SOCKET [UID GID]. One process a connection, HELLO first.
#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include "frame.h"
#include "sandbox.h"

static void serve(int conn) {
  static uint8_t payload[WIRE_MAX + 64], space[256];
  struct frame h;
  struct buf b = {.data = space, .cap = sizeof space};
  if (frame_recv(conn, &h, payload, sizeof payload) || h.type != F_HELLO) _exit(1);
  frame_begin(&b, F_HELLO, 0, 0);
  frame_u64(&b, T_VERSION_MAJOR, WIRE_MAJOR);
  frame_u64(&b, T_VERSION_MINOR, WIRE_MINOR);
  if (frame_send(conn, &b) || frame_recv(conn, &h, payload, sizeof payload) || h.type != F_FILE) _exit(1);
  struct file_request r = {.conn = conn, .request = h.request, .fields = payload, .size = h.length - 8};
  file_serve(&r);
}

int main(int argc, char **argv) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  if (argc < 2) return 2;
  snprintf(a.sun_path, sizeof a.sun_path, "%s", argv[1]);
  int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) || chmod(a.sun_path, 0777) || listen(s, 64)) { perror(argv[1]); return 1; }
  if (argc == 4 && (setgroups(0, NULL) || setgid((gid_t)atoi(argv[3])) || setuid((uid_t)atoi(argv[2])))) { perror("setuid"); return 1; }
  signal(SIGCHLD, SIG_IGN);
  for (;;) {
    int conn = accept(s, NULL, NULL);
    if (conn < 0) { if (errno == EINTR || errno == ECONNABORTED) continue; return 1; }
    if (!fork()) { close(s); serve(conn); }
    close(conn);
  }
}
