// What a process that enters a sandbox gives up: user, groups, capabilities, and system calls.
#include <errno.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

// Docker's default set without MKNOD and NET_RAW.
#define BIT(c) (1ull << (c))
#define KEPT (BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) | BIT(CAP_FSETID) | BIT(CAP_KILL) | BIT(CAP_SETGID) | \
              BIT(CAP_SETUID) | BIT(CAP_SETPCAP) | BIT(CAP_NET_BIND_SERVICE) | BIT(CAP_SYS_CHROOT) | BIT(CAP_AUDIT_WRITE) | BIT(CAP_SETFCAP))

// To join namespaces, and to become another user there.
#define ZYGOTE (BIT(CAP_SYS_ADMIN) | BIT(CAP_SYS_CHROOT) | BIT(CAP_SETUID) | BIT(CAP_SETGID) | BIT(CAP_DAC_OVERRIDE))

// PID 1 needs these and no more. write: to report a failed exec. The pointer of execveat cannot be judged here: it is used once, by us.
static struct sock_filter init_code[] = {
  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pause, 6, 0),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execveat, 5, 0),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 4, 0),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigaction, 3, 0),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 2, 0),
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
};
const struct sock_fprog init_filter = {sizeof init_code / sizeof *init_code, init_code};

uint64_t privilege_most(void) { return KEPT; }

int filter_load(const struct sock_fprog *filter) {
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, filter) ? -1 : 0;
}

int privilege_cut(const struct account *a, int which, struct fault *f) {
  uint64_t keep = which == KEEP_NONE ? 0 : which == KEEP_ZYGOTE ? ZYGOTE : KEPT;
  for (int c = 0; c < 64; c++)         // beyond the kernel's last one: EINVAL
    if (!(keep >> c & 1) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0)) {
      if (errno == EINVAL) break;
      return fault_set(f, "internal", errno, "drop capability %d", c);
    }
  if (setgroups((size_t)a->ngroups, a->groups)) return fault_set(f, "internal", errno, "set the supplementary groups of %s", a->name);
  if (setresgid(a->gid, a->gid, a->gid)) return fault_set(f, "internal", errno, "take group %u", a->gid);
  if (setresuid(a->uid, a->uid, a->uid)) return fault_set(f, "internal", errno, "take user %u", a->uid);
  if (a->uid) keep = 0;                // as after any setuid away from root
  struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct d[2] = {{(uint32_t)keep, (uint32_t)keep, 0}, {(uint32_t)(keep >> 32), (uint32_t)(keep >> 32), 0}};
  if (syscall(SYS_capset, &h, d)) return fault_set(f, "internal", errno, "cut the capabilities");
  return 0;
}
