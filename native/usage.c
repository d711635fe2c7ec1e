// What a sandbox uses as fields of a frame: to the edge, and from the guest of a microVM to its supervisor.
#include "frame.h"
#include "sandbox.h"
#include "wire.h"

void usage_fields(const struct usage *u, struct buf *b) {
  frame_u64(b, T_MEMORY_USED, u->memory);
  frame_u64(b, T_SWAP_USED, u->swap);
  frame_u64(b, T_MEMORY_PEAK, u->memory_peak);
  frame_u64(b, T_CPU_USED_NS, u->cpu_ns);
  frame_u64(b, T_PIDS_USED, u->pids);
  frame_u64(b, T_DISK_USED, u->disk);
  frame_u64(b, T_OOM_KILLS, u->oom_kills);
  frame_u64(b, T_PIDS_HITS, u->pids_hits);
}
