// The launcher: the edge's process that owns the node's mounts and forks one aether a sandbox.
#ifndef DSEC_LAUNCHER_H
#define DSEC_LAUNCHER_H
#include "frame.h"
#include "sandbox.h"

int launcher_main(int argc, char **argv);

// The fields of a launcher request. One struct for all; what a request does not use stays empty.
struct order {
  struct spec spec;
  const char *name, *path, *data;
  uint64_t bytes, time_ns;             // time_ns, seed: to a guest
  const uint8_t *seed;
  size_t seed_size;
  int fill, nkeep;
  const char *keep[16384];             // T_ID of MOUNT_MEDIUM: volumes to leave alone; last, because it is long
};
int order_read(struct order *o, const struct frame *h, const uint8_t *payload, size_t size, struct fault *f);
int spec_check(struct spec *c, const char *cgroup, int creating, struct fault *f); // defaults, and what would be unsafe
#endif
