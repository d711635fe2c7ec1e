// The beginning of a sandbox in a microVM: its supervisor takes the monitor into the sandbox's groups and has the guest make the container.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "machine.h"
#include "mux.h"
#include "node.h"
#include "util.h"

#define VMM_MILLI 250                  // of a CPU, for the monitor and the guest's kernel; the container has its own limit in the guest

static int connect_channel(struct sandbox *s, struct fault *f) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  struct timeval wait = {.tv_sec = (time_t)s->spec.boot_s};
  if (snprintf(a.sun_path, sizeof a.sun_path, "%s", s->spec.channel) >= (int)sizeof a.sun_path)
    return fault_set(f, "invalid_request", ENAMETOOLONG, "the path of the channel of %s", s->spec.id);
  s->channel = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s->channel < 0 || setsockopt(s->channel, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait) || setsockopt(s->channel, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) ||
      connect(s->channel, (struct sockaddr *)&a, sizeof a))
    return fault_host(f, errno, "connect to the guest of %s", s->spec.id);
  return 0;
}

// The process that runs the guest is in the groups of the sandbox: what kills, freezes and limits those does so to all of the guest.
static int take_machine(struct sandbox *s, struct fault *f) {
  char pid[16];
  snprintf(pid, sizeof pid, "%d", s->spec.vmm);
  if ((s->init_fd = sys_pidfd_open(s->spec.vmm)) < 0) return fault_set(f, "resource_exhausted", errno, "open a pidfd of the virtual machine of %s", s->spec.id);
  s->init = s->spec.vmm;
  struct spec inside = s->spec;
  s->spec.memory_bytes = inside.vmm_bytes;
  s->spec.pids = 0;
  s->spec.cpu_milli += s->spec.cpu_milli ? VMM_MILLI : 0;
  int bad = cgroup_limit(s, f);
  s->spec = inside;
  if (bad) return -1;
  for (int i = 0; i < CG_COUNT; i++)
    if (s->box->v1[i] >= 0 && write_at(s->box->v1[i], "cgroup.procs", pid)) return fault_host(f, errno, "move the virtual machine of %s", s->spec.id);
  return write_at(s->cgroup_fd, "cgroup.procs", pid) ? fault_host(f, errno, "move the virtual machine of %s", s->spec.id) : 0;
}

static void describe(struct buf *b, const struct spec *c) {
  uint8_t seed[32];
  struct timespec t;
  frame_begin(b, H_CREATE, 0, 0);
  frame_text(b, T_ID, c->id);
  frame_text(b, T_HOSTNAME, c->hostname);
  frame_text(b, T_WORKDIR, c->workdir);
  frame_text(b, T_USER, c->user);
  for (int i = 0; i < c->nlayers; i++) frame_text(b, T_LAYER, c->layers[i]);
  const struct { uint16_t tag; uint64_t v; } numbers[] = {{T_UID_BASE, c->uid_base}, {T_USERNS, (uint64_t)c->userns}, {T_PIDS, c->pids}, {T_NOFILE, c->nofile},
    {T_MEMORY_BYTES, c->memory_bytes}, {T_SHM_BYTES, c->shm_bytes}, {T_CPU_MILLI, c->cpu_milli}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) frame_u64(b, numbers[i].tag, numbers[i].v);
  if (getrandom(seed, sizeof seed, 0) == sizeof seed) frame_bytes(b, T_SEED, seed, sizeof seed);
  clock_gettime(CLOCK_REALTIME, &t);
  frame_u64(b, T_TIME_NS, (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec);
}

int machine_start(struct sandbox *s, struct fault *f) {
  static uint8_t payload[WIRE_MAX];
  struct frame h;
  size_t size;
  if (take_machine(s, f) || connect_channel(s, f)) return -1;
  struct buf b = mux_buf();
  describe(&b, &s->spec);
  if (frame_send(s->channel, &b)) return fault_set(f, "unavailable", errno, "the guest of %s does not listen", s->spec.id);
  do {
    if (frame_recv(s->channel, &h, payload, sizeof payload))
      return fault_set(f, "unavailable", errno == EAGAIN ? ETIMEDOUT : errno, "the guest of %s did not come up within %llu s", s->spec.id, (unsigned long long)s->spec.boot_s);
    size = h.length - (sizeof h - sizeof h.length);
  } while (h.type != H_READY && h.type != H_FAILED);
  if (h.type == H_READY) return 0;
  machine_refusal(payload, size, f);
  return -1;
}
