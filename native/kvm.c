// See kvm.h. The guest is one page of code that counts down in ring 0 of long mode and then touches memory that is not there.
#include "kvm.h"
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <linux/kvm.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>

#define MEMORY (2u << 20)
#define COUNT 200000u                  // loops: 0.1 ms where they run, 0.2 s where they are interpreted
#define NATIVE_NS 50                   // a loop of two instructions takes 0.3 to 1 ns on a CPU, hundreds in an interpreter
#define LONGEST_S 5
#define NOWHERE 0x40000000u

static void on_alarm(int sig) { (void)sig; }

static struct kvm_segment segment(uint16_t selector, uint8_t type, uint8_t long_mode) {
  return (struct kvm_segment){.selector = selector, .limit = 0xfffff, .type = type, .present = 1, .s = 1, .l = long_mode, .db = !long_mode, .g = 1};
}

static void fill(uint8_t *memory) {
  // mov ecx, COUNT; again: dec ecx; jnz again; mov [NOWHERE], al (by way of edx); hlt
  static const uint8_t code[] = {0xb9, COUNT & 0xff, COUNT >> 8 & 0xff, COUNT >> 16 & 0xff, 0, 0xff, 0xc9, 0x75, 0xfc, 0xba, 0, 0, 0, 0x40, 0x88, 0x02, 0xf4};
  uint64_t *top = (uint64_t *)(void *)(memory + 0x1000), *middle = (uint64_t *)(void *)(memory + 0x2000);
  uint64_t *low = (uint64_t *)(void *)(memory + 0x3000), *high = (uint64_t *)(void *)(memory + 0x4000);
  const uint64_t table = 3, large = 0x83;                // present, writable; and a page of 2 MiB
  top[0] = 0x2000 | table;
  middle[0] = 0x3000 | table;
  middle[1] = 0x4000 | table;
  low[0] = large;
  high[0] = NOWHERE | large;
  memcpy(memory + 0x8000, code, sizeof code);
}

static int prepare(int kvm, int vm, int cpu, uint8_t *memory) {
  static struct { struct kvm_cpuid2 head; struct kvm_cpuid_entry2 entries[256]; } features = {.head = {.nent = 256}};
  struct kvm_userspace_memory_region region = {.memory_size = MEMORY, .userspace_addr = (uint64_t)(uintptr_t)memory};
  struct kvm_sregs s;
  struct kvm_regs r = {.rip = 0x8000, .rsp = 0x10000, .rflags = 2};
  if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) || ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &features) || ioctl(cpu, KVM_SET_CPUID2, &features) ||
      ioctl(cpu, KVM_GET_SREGS, &s))
    return -1;
  s.cr0 = 0x80050033;
  s.cr3 = 0x1000;
  s.cr4 = 0x20;
  s.efer = 0xd01;
  s.cs = segment(0x10, 0xb, 1);
  s.ds = s.es = s.fs = s.gs = s.ss = segment(0x18, 3, 0);
  return ioctl(cpu, KVM_SET_SREGS, &s) || ioctl(cpu, KVM_SET_REGS, &r) ? -1 : 0;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int kvm_main(void) {
  int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
  if (kvm < 0) { printf("no /dev/kvm: %s\n", strerror(errno)); return 1; }
  int vm = ioctl(kvm, KVM_CREATE_VM, 0), cpu = vm < 0 ? -1 : ioctl(vm, KVM_CREATE_VCPU, 0), size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
  uint8_t *memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct kvm_run *run = cpu < 0 || size <= 0 ? MAP_FAILED : mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, cpu, 0);
  if (memory == MAP_FAILED || run == MAP_FAILED) { printf("KVM cannot make a machine: %s\n", strerror(errno)); return 1; }
  fill(memory);
  if (prepare(kvm, vm, cpu, memory)) { printf("KVM cannot prepare a processor: %s\n", strerror(errno)); return 1; }
  struct sigaction a = {.sa_handler = on_alarm};         // without SA_RESTART: it ends KVM_RUN
  sigaction(SIGALRM, &a, NULL);
  alarm(LONGEST_S);
  double began = seconds();
  int bad = ioctl(cpu, KVM_RUN, 0);
  double took = seconds() - began;
  struct kvm_regs r = {0};
  ioctl(cpu, KVM_GET_REGS, &r);
  double each = took * 1e9 / (COUNT - (double)(r.rcx < COUNT ? r.rcx : COUNT - 1));
  if (!bad && run->exit_reason != KVM_EXIT_MMIO) { printf("KVM ended a guest with reason %u\n", run->exit_reason); return 1; }
  printf("a loop in ring 0 takes %.1f ns%s\n", each, each > NATIVE_NS ? ": guests' kernels are interpreted" : "");
  return each > NATIVE_NS ? 3 : 0;
}
#else
int kvm_main(void) {
  puts("not on this architecture");
  return 1;
}
#endif
