// aether: the C side of dsec in one static binary.
//   aether launcher --run DIR --state DIR --cgroup NAME --seccomp FILE [--join PID] [--fill-ms N] [--fill-by HOW] [--criu DIR]
//                  (control socket: descriptor 3)
//   aether vmm --uid N --cgroup DIR [--kvm] -- PROGRAM ARGUMENT...  (its pid on descriptor 1)
//   aether kvm                            (whether /dev/kvm runs the kernels of guests: kvm.c)
//   aether version
// As PID 1 it is the hand of a microVM (hand.c).
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "hand.h"
#include "kvm.h"
#include "launcher.h"
#include "vmm.h"
#include "wire.h"

int main(int argc, char **argv) {
  if (getpid() == 1) hand_main();
  if (argc > 1 && !strcmp(argv[1], "launcher")) return launcher_main(argc, argv);
  if (argc == 2 && !strcmp(argv[1], "kvm")) return kvm_main();
  if (argc > 1 && !strcmp(argv[1], "vmm")) return vmm_main(argc, argv);
  if (argc == 2 && !strcmp(argv[1], "version")) {
    printf("wire %d.%d\n", WIRE_MAJOR, WIRE_MINOR);
    return 0;
  }
  fprintf(stderr, "usage: %s launcher --run DIR --state DIR --cgroup NAME --seccomp FILE [--join PID] [--fill-ms N] [--fill-by HOW] [--criu DIR] | version\n", argv[0]);
  return 2;
}
