"""The seccomp filter of every command in a sandbox, as the raw program that the kernel takes.

`python -m dsec.guard.seccomp FILE` writes it; `build` does the same. The file is an array of `struct sock_filter` (8 bytes each) for this
machine's architecture and is loaded with SECCOMP_SET_MODE_FILTER after no_new_privs. Filters of a parent stay in force in all children.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from pathlib import Path

import pyseccomp

from dsec.guard import policy
from dsec.guard.bpf import ALLOW, ARCH, ERRNO, JEQ, JGE, JSET, NR, Program, arg, tree

ARCHITECTURES = {"x86_64": (0xC000003E, pyseccomp.Arch.X86_64), "aarch64": (0xC00000B7, pyseccomp.Arch.AARCH64)}
ZYGOTE = frozenset(("setns",))  # what a zygote may beside a sandbox's commands: send its child into a call's namespaces
JUDGED = ("clone", "clone3", "personality", "socket", "socketpair", "mknod", "mknodat", "ioctl", "fcntl", "prctl")


class PolicyError(Exception):
    """The filter cannot be built here."""


def number(name: str, machine: str) -> int | None:
    """Number of a system call, None when this architecture has none of this name."""
    if name in policy.NEW_NUMBERS:
        return policy.NEW_NUMBERS[name]
    if name in policy.X86_ONLY_NEW:
        return policy.X86_ONLY_NEW[name] if machine == "x86_64" else None
    found = int(pyseccomp.resolve_syscall(ARCHITECTURES[machine][1], name))
    return found if found >= 0 else None


def program(machine: str | None = None, allowed: frozenset[str] = frozenset()) -> bytes:
    """The filter for an architecture (default: this machine's). `allowed`: calls that pass although a sandbox's commands may not."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise PolicyError(f"no seccomp policy for {machine}; there is one for {', '.join(ARCHITECTURES)}")
    targets: dict[int, str] = {}
    for names, label in ((policy.ALLOWED, "allow"), (policy.REFUSED, "eperm"), (JUDGED, None)):
        for name in names:
            found = number(name, machine)
            if found is not None:
                if found in targets:
                    raise PolicyError(f"system call {name} is in two lists")
                targets[found] = "allow" if name in allowed else label or name
    made = Program()
    made.load(ARCH)
    made.jump(JEQ, ARCHITECTURES[machine][0], None, "enosys")  # 32-bit calls on a 64-bit kernel
    made.load(NR)
    top = max(targets) + 1
    made.jump(JGE, top, "enosys", None)  # later kernels' calls, and x32's, which have bit 30 set
    tree(made, targets, "enosys", top)
    _judge(made, set(targets.values()))
    for label, action in (
        ("enosys", ERRNO | errno.ENOSYS),
        ("eperm", ERRNO | errno.EPERM),
        ("einval", ERRNO | errno.EINVAL),
        ("eafnosupport", ERRNO | errno.EAFNOSUPPORT),
        ("eprotonosupport", ERRNO | errno.EPROTONOSUPPORT),
        ("allow", ALLOW),
    ):
        made.mark(label)
        made.ret(action)
    return made.assemble()


def _judge(made: Program, used: set[str]) -> None:
    """Argument checks. Only the low 32 bits are read: the kernel truncates these arguments the same way, so nothing hides above them.

    clone's flags are 64 bits wide, yet no namespace flag lies above bit 31.
    """
    made.mark("clone3")  # its flags are behind a pointer; libc falls back to clone
    made.ret(ERRNO | errno.ENOSYS)

    made.mark("clone")
    made.load(arg(0))
    made.jump(JSET, policy.CLONE_NAMESPACES, "eperm", "allow")

    made.mark("personality")
    made.load(arg(0))
    _one_of(made, policy.PERSONALITIES, "eperm")

    made.mark("socket")
    made.load(arg(0))
    for family in policy.FAMILIES.values():
        made.jump(JEQ, family, "allow", None)
    made.jump(JEQ, policy.AF_NETLINK, None, "eafnosupport")
    made.load(arg(2))
    _one_of(made, tuple(policy.NETLINK_PROTOCOLS.values()), "eprotonosupport")

    made.mark("socketpair")
    made.load(arg(0))
    _one_of(made, (policy.FAMILIES["AF_UNIX"],), "eafnosupport")

    for name, index in (("mknod", 1), ("mknodat", 2)):
        if name in used:  # aarch64 has no mknod
            made.mark(name)
            made.load(arg(index))
            made.mask(policy.S_IFMT)
            _one_of(made, policy.NODE_TYPES, "eperm")

    made.mark("fcntl")
    made.load(arg(1))
    for command in list(policy.FCNTL_REFUSED.values())[:-1]:
        made.jump(JEQ, command, "eperm", None)
    made.jump(JEQ, list(policy.FCNTL_REFUSED.values())[-1], "eperm", "allow")

    made.mark("prctl")
    made.load(arg(0))
    made.jump(JEQ, policy.PRCTL_REFUSED["PR_SCHED_CORE"], "einval", "allow")  # as a kernel without it answers

    made.mark("ioctl")
    made.load(arg(1))
    for request in policy.IOCTLS_PASSED.values():
        made.jump(JEQ, request, "allow", None)
    for request in policy.IOCTLS_REFUSED.values():
        made.jump(JEQ, request, "eperm", None)
    made.mask(0xFF00)
    for family in list(policy.IOCTL_FAMILIES)[:-1]:
        made.jump(JEQ, family << 8, "eperm", None)
    made.jump(JEQ, list(policy.IOCTL_FAMILIES)[-1] << 8, "eperm", "allow")


def _one_of(made: Program, values: tuple[int, ...], otherwise: str) -> None:
    for value in values[:-1]:
        made.jump(JEQ, value, "allow", None)
    made.jump(JEQ, values[-1], "allow", otherwise)


def build(path: str | os.PathLike[str], machine: str | None = None, allowed: frozenset[str] = frozenset()) -> Path:
    """Write the filter where the supervisor reads it; a file with the same bytes is left alone. Returns the path."""
    target = Path(path)
    data = program(machine, allowed)
    if not (target.exists() and target.read_bytes() == data):
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        fresh.write_bytes(data)
        fresh.replace(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dsec.guard.seccomp FILE")
    written = build(sys.argv[1])
    print(f"{written}: {written.stat().st_size // 8} instructions")
