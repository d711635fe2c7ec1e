"""The OCI arms: a bundle for crun that asks for the same container as ours, and the commands of crun and podman."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec.guard import policy
from dsec.guard.seccomp import number

UID_BASE = 2_000_000  # as in bench/floor/arena.h
CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_AUDIT_WRITE", "CAP_SETFCAP",
]  # fmt: skip
MASKED = ["kcore", "keys", "timer_list", "kpagecount", "kpagecgroup", "kpageflags", "sysrq-trigger", "kallsyms", "config.gz", "interrupts",
          "kmsg", "slabinfo", "vmallocinfo", "scsi", "acpi", "asound"]  # fmt: skip
READONLY = ["sys", "bus", "fs", "irq"]


@dataclass(frozen=True)
class Limits:
    """Of one container."""

    memory_mb: int
    pids: int
    cpu_cores: float


def bundle(directory: Path, root: str, cgroup: str, *, limits: Limits, argv: list[str]) -> None:
    """Write `config.json` for one container whose root file system is mounted at `root`."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = [{"containerID": 0, "hostID": UID_BASE, "size": 65536}]
    config: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False, "user": {"uid": 0, "gid": 0}, "args": argv, "cwd": "/", "noNewPrivileges": True,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "capabilities": {name: CAPABILITIES for name in ("bounding", "effective", "permitted")},
        },
        "root": {"path": root, "readonly": False},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "nodev", "noexec"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "noexec", "mode=755", "size=64k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "noexec", "size=64m"]},
        ],
        "linux": {
            "uidMappings": ids, "gidMappings": ids, "cgroupsPath": cgroup,
            "namespaces": [{"type": name} for name in ("user", "pid", "mount", "network", "ipc", "uts", "cgroup")],
            "resources": {
                "memory": {"limit": limits.memory_mb << 20, "swap": limits.memory_mb << 20}, "pids": {"limit": limits.pids},
                "cpu": {"quota": int(limits.cpu_cores * 100_000), "period": 100_000},
            },
            "seccomp": seccomp(),
            "maskedPaths": [f"/proc/{name}" for name in MASKED], "readonlyPaths": [f"/proc/{name}" for name in READONLY],
        },
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def seccomp() -> dict[str, Any]:
    """Our own filter's lists in OCI form, as far as libseccomp knows the names; the judged calls pass."""
    new = {*policy.NEW_NUMBERS, *policy.X86_ONLY_NEW}
    known = [n for n in sorted(policy.ALLOWED - new) if number(n, "x86_64") is not None]
    judged = ["clone", "personality", "socket", "socketpair", "mknod", "mknodat", "ioctl"]
    refused = [n for n in sorted(policy.REFUSED - new) if number(n, "x86_64") is not None]
    return {
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            {"names": known + judged, "action": "SCMP_ACT_ALLOW"}, {"names": refused, "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
        ],
    }  # fmt: skip


def crun_run(state: Path) -> list[str]:
    """`crun run`, as an argument list for bench/floor/oci.c."""
    return ["crun", "--cgroup-manager=cgroupfs", f"--root={state}", "run", "--bundle", "{bundle}", "{id}"]


def podman(root: Path, run: Path) -> list[str]:
    """podman with storage of its own. With runc: its crun refuses a v2 tree beside v1."""
    return ["podman", f"--root={root}", f"--runroot={run}", "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]


def podman_run(state: Path, run: Path, group: str, *, limits: Limits, argv: list[str]) -> list[str]:
    """`podman run --rm` on a mounted root, as an argument list for bench/floor/oci.c."""
    return [
        *podman(state / "root", run), "run", "--rm", "--name={id}", "--network=none", f"--memory={limits.memory_mb}m",
        f"--memory-swap={limits.memory_mb}m", f"--pids-limit={limits.pids}", f"--cpus={limits.cpu_cores}", f"--cgroup-parent=/{group}",
        f"--uidmap=0:{UID_BASE}:65536", f"--gidmap=0:{UID_BASE}:65536", "--ulimit=nofile=1024:1024",
        "--ulimit=nproc=1000:1000", "--log-driver=none", "--rootfs", "{root}", *argv,
    ]  # fmt: skip
