// aether: the C side of dsec in one static binary.
//   aether launcher --run DIR --state DIR --cgroup NAME --seccomp FILE [--join PID] [--fill-ms N] [--fill-by HOW] [--criu DIR]
//                  (control socket: descriptor 3)
//   aether version
#include <stdio.h>
#include <string.h>
#include "launcher.h"
#include "wire.h"

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "launcher")) return launcher_main(argc, argv);
  if (argc == 2 && !strcmp(argv[1], "version")) {
    printf("wire %d.%d\n", WIRE_MAJOR, WIRE_MINOR);
    return 0;
  }
  fprintf(stderr, "usage: %s launcher --run DIR --state DIR --cgroup NAME --seccomp FILE [--join PID] [--fill-ms N] [--fill-by HOW] [--criu DIR] | version\n", argv[0]);
  return 2;
}
