"""The filter as a program: what each call gets, by running its BPF in an interpreter of our own."""

from __future__ import annotations

import errno
import platform
import struct
from pathlib import Path

import pytest

from dsec.guard import policy, seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
ALLOW = 0x7FFF0000

# What Docker's default profile does not allow a container with the default capabilities (docs/guard.md).
DOCKER_DENIES = """
acct add_key bpf clock_adjtime clock_settime create_module delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick
get_kernel_syms get_mempolicy init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load
kexec_load keyctl lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at
open_tree perf_event_open pidfd_getfd pivot_root process_madvise query_module quotactl quotactl_fd reboot request_key
set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon sysfs syslog umount2 unshare
uselib userfaultfd ustat vhangup _sysctl
""".split()

# What ordinary programs (shells, compilers, Python, Node, git, gdb, databases) cannot do without.
NEEDED = """
read write openat close mmap munmap mprotect brk fork vfork execve execveat exit_group wait4 clone pipe2 dup3 fcntl ioctl poll
epoll_wait epoll_pwait2 futex rseq set_robust_list getrandom statx newfstatat getdents64 renameat2 fallocate copy_file_range
sendfile splice bind connect accept4 listen sendmsg recvmsg socketpair shutdown eventfd2 signalfd4 timerfd_create inotify_init1
inotify_add_watch memfd_create ptrace process_vm_readv landlock_create_ruleset seccomp prctl capget capset chroot chown setuid
setgroups kill tgkill pidfd_open pidfd_send_signal sched_setaffinity setpriority prlimit64 getrlimit sysinfo uname
mlock membarrier close_range openat2 faccessat2 fchmodat2 cachestat flock fsync sync_file_range setxattr
getxattr utimensat symlinkat linkat unlinkat umask nanosleep clock_nanosleep shmget semget msgget mq_open
""".split()


def run(code: bytes, number: int, args: tuple[int, ...] = (), arch: int | None = None) -> tuple[int, int]:
    """Answer of the program: (action, steps)."""
    arch = ARCH[platform.machine()] if arch is None else arch
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *(args + (0,) * (6 - len(args))))
    program = [struct.unpack("<HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    at, a, steps = 0, 0, 0
    while True:
        op, yes, no, k = program[at]
        steps += 1
        at += 1
        if op == 0x20:
            assert k % 4 == 0 and k < 64
            a = struct.unpack_from("<I", data, k)[0]
        elif op == 0x54:
            a &= k
        elif op in (0x15, 0x35, 0x45):
            at += yes if (a == k if op == 0x15 else a >= k if op == 0x35 else bool(a & k)) else no
        elif op == 0x06:
            return k, steps
        else:
            raise AssertionError(f"instruction {op:#x}")


def refused(number: int) -> int:
    return 0x00050000 | number


@pytest.fixture(scope="module", params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def code(machine: str) -> bytes:
    return seccomp.program(machine)


def call(code: bytes, machine: str, name: str, *args: int) -> int:
    number = seccomp.number(name, machine)
    assert number is not None, name
    return run(code, number, args, ARCH[machine])[0]


def test_what_docker_denies_is_denied(code: bytes, machine: str) -> None:
    for name in DOCKER_DENIES:
        number = seccomp.number(name, machine)
        if number is not None:
            assert run(code, number, (), ARCH[machine])[0] == refused(errno.EPERM), name


def test_what_programs_need_is_allowed(code: bytes, machine: str) -> None:
    for name in NEEDED:
        number = seccomp.number(name, machine)
        if number is not None:
            args = (1,) if name == "socketpair" else ()
            assert run(code, number, args, ARCH[machine])[0] == ALLOW, name


def test_every_number_is_decided_within_few_steps(code: bytes, machine: str) -> None:
    allowed = {seccomp.number(name, machine) for name in policy.ALLOWED}
    refused_numbers = {seccomp.number(name, machine) for name in policy.REFUSED}
    judged = {seccomp.number(name, machine) for name in seccomp.JUDGED}
    for number in range(600):
        action, steps = run(code, number, (), ARCH[machine])
        assert steps <= 32
        if number in judged:
            continue
        want = ALLOW if number in allowed else refused(errno.EPERM) if number in refused_numbers else refused(errno.ENOSYS)
        assert action == want, number


def test_lists_do_not_overlap() -> None:
    assert not policy.ALLOWED & policy.REFUSED
    assert not set(seccomp.JUDGED) & (policy.ALLOWED | policy.REFUSED)


@pytest.mark.parametrize("number", [0x40000000, 0x40000000 + 59, 0xFFFFFFFF, 0x7FFFFFFF, 1024])
def test_x32_and_unknown_numbers(code: bytes, machine: str, number: int) -> None:
    assert run(code, number, (), ARCH[machine])[0] == refused(errno.ENOSYS)


def test_other_architectures(code: bytes) -> None:
    for number in range(500):
        assert run(code, number, (), I386)[0] == refused(errno.ENOSYS)


def test_clone(code: bytes, machine: str) -> None:
    thread = 0x003D0F00  # what pthread_create passes
    assert call(code, machine, "clone", thread) == ALLOW
    assert call(code, machine, "clone", 17) == ALLOW
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(code, machine, "clone", bit | 17) == refused(errno.EPERM)
        assert call(code, machine, "clone", 0xABCD << 32 | bit | 17) == refused(errno.EPERM)
    assert call(code, machine, "clone3") == refused(errno.ENOSYS)


def test_sockets(code: bytes, machine: str) -> None:
    for family in (1, 2, 10):
        assert call(code, machine, "socket", family, 1, 0) == ALLOW
    for protocol, action in (
        (0, ALLOW),
        (4, ALLOW),
        (15, ALLOW),
        (12, refused(errno.EPROTONOSUPPORT)),
        (16, refused(errno.EPROTONOSUPPORT)),
    ):
        assert call(code, machine, "socket", 16, 3, protocol) == action
    for family in (17, 38, 40, 29, 30, 44, 9, 31):  # packet, alg, vsock, can, tipc, xdp, x25, bluetooth
        assert call(code, machine, "socket", family, 1, 0) == refused(errno.EAFNOSUPPORT)
        assert call(code, machine, "socket", 1 << 32 | family, 1, 0) == refused(errno.EAFNOSUPPORT)
    assert call(code, machine, "socketpair", 1, 1, 0) == ALLOW
    assert call(code, machine, "socketpair", 40, 1, 0) == refused(errno.EAFNOSUPPORT)


def test_device_nodes(code: bytes, machine: str) -> None:
    for name, at in (("mknod", 1), ("mknodat", 2)):
        if seccomp.number(name, machine) is None:
            continue
        for mode, action in (
            (0o644, ALLOW),
            (0o100644, ALLOW),
            (0o010644, ALLOW),
            (0o140755, ALLOW),
            (0o020666, refused(errno.EPERM)),
            (0o060600, refused(errno.EPERM)),
        ):
            args = (0,) * at + (mode,)
            assert call(code, machine, name, *args) == action


def test_personality(code: bytes, machine: str) -> None:
    for value in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
        assert call(code, machine, "personality", value) == ALLOW
    for value in (0x0040000, 0x0400000, 6):
        assert call(code, machine, "personality", value) == refused(errno.EPERM)


def test_prctl(code: bytes, machine: str) -> None:
    for option in (1, 4, 15, 22, 38, 0x53564D41):
        assert call(code, machine, "prctl", option) == ALLOW
    for option in (62, (1 << 32) + 62):
        assert call(code, machine, "prctl", option, 1) == refused(errno.EINVAL)


IOCTLS_DENIED = {
    "XFS_IOC_SWAPEXT": 0xC0C0586D,
    "XFS_IOC_EXCHANGE_RANGE": 0x40285881,
    "XFS_IOC_COMMIT_RANGE": 0x40585883,
    "FIFREEZE": 0xC0045877,
    "FITRIM": 0xC0185879,
    "XFS_IOC_GOINGDOWN": 0x8004587D,
    "EXT4_IOC_MOVE_EXT": 0xC028660F,
    "EXT4_IOC_RESIZE_FS": 0x40086610,
    "BTRFS_IOC_SUBVOL_CREATE": 0x5000940E,
    "BTRFS_IOC_SNAP_CREATE_V2": 0x50009417,
    "BTRFS_IOC_SNAP_DESTROY": 0x5000940F,
    "BTRFS_IOC_QGROUP_LIMIT": 0x8030942B,
    "BTRFS_IOC_QUOTA_CTL": 0xC0109428,
    "BTRFS_IOC_SET_RECEIVED_SUBVOL": 0xC0C89425,
    "BTRFS_IOC_DEFRAG": 0x50009402,
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
    "TIOCSETD": 0x5423,
}
IOCTLS_ALLOWED = {
    "TCGETS": 0x5401,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "TIOCGPTN": 0x80045430,
    "FICLONE": 0x40049409,
    "FICLONERANGE": 0x4020940D,
    "FIDEDUPERANGE": 0xC0189436,
    "FS_IOC_GETFLAGS": 0x80086601,
    "FS_IOC_FIEMAP": 0xC020660B,
    "SIOCGIFCONF": 0x8912,
    "FIOCLEX": 0x5451,
}


def test_ioctls(code: bytes, machine: str) -> None:
    for name, request in IOCTLS_DENIED.items():
        assert call(code, machine, "ioctl", 3, request) == refused(errno.EPERM), name
        assert call(code, machine, "ioctl", 3, 0xFFFFFFFF << 32 | request) == refused(errno.EPERM), name
    for name, request in IOCTLS_ALLOWED.items():
        assert call(code, machine, "ioctl", 3, request) == ALLOW, name


def test_build_writes_once(tmp_path: Path) -> None:
    path = seccomp.build(tmp_path / "run" / "filter")
    first = path.stat()
    assert first.st_size % 8 == 0 and first.st_size // 8 < 256
    assert seccomp.build(path).stat().st_mtime_ns == first.st_mtime_ns
    with pytest.raises(seccomp.PolicyError, match="mips"):
        seccomp.program("mips")
