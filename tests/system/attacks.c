// What an agent may try against a copy of its memory, each by a letter: see test_fork_memory_attacks.py. Static, so that all its code lies low.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <unistd.h>

// s: a critical section over all addresses but the program's own. Code in it that is interrupted goes on at `taken`, with whatever rights it has.
__asm__(".text\n.long 0x53053053\n"
        "taken: mov $85, %eax\n lea hijacked(%rip), %rdi\n mov $0644, %esi\n syscall\n"           // creat
        "mov $272, %eax\n mov $0x10000000, %edi\n syscall\n test %eax, %eax\n jnz 2f\n"            // unshare(CLONE_NEWUSER), which the filter refuses
        "mov $85, %eax\n lea owned(%rip), %rdi\n mov $0644, %esi\n syscall\n"
        "2: mov $34, %eax\n syscall\n jmp 2b\n"                                                    // pause
        "hijacked: .string \"/srv/hijacked\"\nowned: .string \"/srv/owned\"\n");
extern char taken[];
static struct rseq_cs section __attribute__((aligned(32)));

static void *critical(void *none) {
  volatile uint64_t *at = (uint64_t *)(void *)((char *)__builtin_thread_pointer() + __rseq_offset + 8);
  for (;;) *at = (uint64_t)(uintptr_t)&section;
  return none;
}

static int sections(void) {
  pthread_t threads[3];
  section = (struct rseq_cs){.start_ip = 0x10000000, .post_commit_offset = 0x7fff00000000 - 0x10000000, .abort_ip = (uintptr_t)taken};
  for (int i = 0; i < 3; i++)
    if (pthread_create(&threads[i], NULL, critical, NULL)) return 1;
  for (;;) {
    puts("fine");
    fflush(stdout);
    usleep(50000);
  }
}

static char stack[65536] __attribute__((aligned(16)));
static int wait_for_ever(void *none) { (void)none; for (;;) pause(); }

static int alone(int flags) {          // v: the parent waits until the child runs a program; m: both run, with one memory
  puts("fine");
  fflush(stdout);
  if (clone(wait_for_ever, stack + sizeof stack, flags, NULL) < 0) return 1;
  return wait_for_ever(NULL);
}

int main(int argc, char **argv) {
  switch (argc > 1 ? *argv[1] : 0) {
    case 's': return sections();
    case 'v': return alone(CLONE_VM | CLONE_VFORK);
    case 'm': return alone(CLONE_VM);
    default: return 2;
  }
}
