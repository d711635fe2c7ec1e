"""The system calls of a sandbox, by name: allowed, refused, and judged by their arguments. docs/guard.md says why.

ALLOWED passes whatever the arguments. REFUSED answers EPERM: calls that programs know and can live without. What is in neither list, now
or in a later kernel, answers ENOSYS, which libraries take as "this kernel is older" and fall back from. JUDGED is in
`dsec.guard.seccomp`.
"""

from __future__ import annotations

ALLOWED = frozenset(
    """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close close_range lseek
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir
    rename renameat renameat2 link linkat unlink unlinkat symlink symlinkat mkdir mkdirat rmdir chmod fchmod fchmodat fchmodat2
    chown fchown lchown fchownat umask utime utimes utimensat futimesat truncate ftruncate fallocate fadvise64 readahead
    getdents getdents64 fsync fdatasync sync syncfs sync_file_range sendfile splice tee vmsplice copy_file_range
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
    setxattrat getxattrat listxattrat removexattrat file_getattr name_to_handle_at chroot flock dup dup2 dup3 pipe pipe2 cachestat

    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait epoll_wait_old epoll_pwait epoll_pwait2
    eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime inotify_init inotify_init1 inotify_add_watch
    inotify_rm_watch fanotify_mark

    mmap munmap mprotect mremap msync mincore madvise brk mlock mlock2 mlockall munlock munlockall remap_file_pages
    memfd_create memfd_secret pkey_alloc pkey_free pkey_mprotect membarrier map_shadow_stack mseal
    shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr

    fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid getsid setsid
    set_tid_address set_robust_list get_robust_list futex futex_waitv futex_wake futex_wait futex_requeue rseq restart_syscall
    arch_prctl seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
    ptrace process_vm_readv process_vm_writev process_mrelease pidfd_open pidfd_send_signal
    kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
    sigaltstack pause alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
    timer_create timer_delete timer_settime timer_gettime timer_getoverrun adjtimex uretprobe
    sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_setscheduler sched_getattr
    sched_setattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority setpriority ioprio_get ioprio_set getcpu
    getrlimit setrlimit prlimit64 getrusage sysinfo uname getrandom

    getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid setgroups
    setfsuid setfsgid capget capset lsm_get_self_attr lsm_list_modules

    bind connect listen accept accept4 getsockname getpeername getsockopt setsockopt shutdown
    sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg
""".split()
)

REFUSED = frozenset(
    """
    mount umount2 pivot_root fsopen fsconfig fsmount fspick open_tree open_tree_attr move_mount mount_setattr statmount listmount setns
    unshare swapon swapoff quotactl quotactl_fd acct open_by_handle_at fanotify_init file_setattr

    kexec_load kexec_file_load init_module finit_module delete_module create_module query_module get_kernel_syms
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key
    lookup_dcookie syslog reboot vhangup iopl ioperm modify_ldt

    settimeofday clock_settime clock_adjtime sethostname setdomainname
    kcmp pidfd_getfd process_madvise get_mempolicy set_mempolicy set_mempolicy_home_node mbind migrate_pages move_pages
    nfsservctl uselib ustat sysfs _sysctl lsm_set_self_attr getpmsg putpmsg afs_syscall tuxcall security vserver
""".split()
)

# Calls that libseccomp of the oldest supported release does not know by name. Equal numbers on every architecture.
NEW_NUMBERS = {
    "cachestat": 451,
    "fchmodat2": 452,
    "map_shadow_stack": 453,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
    "mseal": 462,
    "setxattrat": 463,
    "getxattrat": 464,
    "listxattrat": 465,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_getattr": 468,
    "file_setattr": 469,
}
X86_ONLY_NEW = {"uretprobe": 335}

CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET; CLONE_NEWTIME is no flag of clone(2)

# personality(2): Linux, UNAME26, both with the 32-bit bit, and the query.
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# socket(2): families, and the netlink protocols. A network namespace does not confine AF_VSOCK: it reaches the host.
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
AF_NETLINK = 16
NETLINK_PROTOCOLS = {"NETLINK_ROUTE": 0, "NETLINK_SOCK_DIAG": 4, "NETLINK_KOBJECT_UEVENT": 15}

# mknod(2): file types that are no device.
S_IFMT = 0o170000
NODE_TYPES = (0, 0o100000, 0o010000, 0o140000)

# ioctl(2). Whole families (the second byte) that reshape a file system are refused, but for the named harmless requests.
IOCTL_FAMILIES = {
    0x58: "X: XFS (SWAPEXT, EXCHANGE_RANGE, COMMIT_RANGE, ...), FIFREEZE, FITHAW, FITRIM, shutdown",
    0x66: "f: ext4 (MOVE_EXT, RESIZE, SWAP_BOOT, ...), fscrypt, fs-verity",
    0x94: "btrfs: subvolumes, snapshots, quota groups, balance, devices",
    0xF5: "f2fs",
    0x6E: "n: nilfs2",
}
IOCTLS_PASSED = {
    "FICLONE": 0x40049409,
    "FICLONERANGE": 0x4020940D,
    "FIDEDUPERANGE": 0xC0189436,
    "FS_IOC_GETFSLABEL": 0x81009431,
    "FS_IOC_FSGETXATTR": 0x801C581F,
    "FS_IOC_GETFLAGS": 0x80086601,
    "FS_IOC32_GETFLAGS": 0x80046601,
    "FS_IOC_SETFLAGS": 0x40086602,
    "FS_IOC32_SETFLAGS": 0x40046602,
    "FS_IOC_FIEMAP": 0xC020660B,
}
IOCTLS_REFUSED = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCCONS": 0x541D, "TIOCSETD": 0x5423}

# prctl(2). A sandbox with a cookie of its own would share cores with nobody: half of each core that it runs on would be idle.
PRCTL_REFUSED = {"PR_SCHED_CORE": 62}

# fcntl(2). Whoever opens or runs a leased file waits for its holder, up to 45 s: so would the supervisor, which starts commands.
FCNTL_REFUSED = {"F_SETLEASE": 1024, "F_SETDELEG": 1040}
