"""The filter in the kernel: loaded in a child, it refuses what it should and lets programs run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.guard import seccomp

pytestmark = pytest.mark.root

TRY = r"""
import ctypes, errno, fcntl, json, os, socket, subprocess, sys, threading
from pathlib import Path
from dsec.guard.seccomp import number
from dsec.linux import calls
from dsec.linux.probes import load_filter
machine = os.uname().machine
load_filter(Path(sys.argv[1]).read_bytes())
found = {}
def attempt(name, what):
    try:
        what()
        found[name] = "ok"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
for name in sys.argv[2].split(","):
    found_number = number(name, machine)
    if found_number is not None:
        attempt(name, lambda: calls.syscall(found_number, -1, None, -1, None, 0, 0))
with open("/dev/null") as null:
    attempt("swapext", lambda: fcntl.ioctl(null, 0xC0C0586D, b"\0" * 192))
    attempt("snap_create", lambda: fcntl.ioctl(null, 0x50009417, b"\0" * 256))
    attempt("tiocsti", lambda: fcntl.ioctl(null, 0x5412, b"x"))
for family in (17, 38, 40):
    attempt(f"socket {family}", lambda: socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM, 0))
attempt("netfilter", lambda: socket.socket(16, socket.SOCK_RAW, 12))
attempt("netlink", lambda: socket.socket(16, socket.SOCK_RAW, 0).close())
attempt("tcp", lambda: socket.socket().close())
attempt("socketpair", lambda: [s.close() for s in socket.socketpair()])
attempt("clone newuser", lambda: calls.syscall(number("clone", machine), 0x10000000 | 17, 0, 0, 0, 0))
attempt("device", lambda: os.mknod(sys.argv[3] + "/device", 0o020600, os.makedev(1, 3)))
attempt("fifo", lambda: os.mknod(sys.argv[3] + "/fifo", 0o010600))
attempt("personality", lambda: calls.syscall(number("personality", machine), 0x0040000))
thread = threading.Thread(target=lambda: found.update(thread="ok"))
thread.start()
thread.join()
found["child"] = subprocess.run(["sh", "-c", "echo one | cat; exit 7"], capture_output=True).returncode
print(json.dumps(found))
"""

REFUSED = """
unshare setns mount umount2 pivot_root fsopen fsmount move_mount open_tree mount_setattr bpf perf_event_open userfaultfd keyctl
add_key request_key io_uring_setup io_uring_enter io_uring_register open_by_handle_at kexec_load init_module finit_module
delete_module swapon reboot kcmp pidfd_getfd syslog
""".split()


def test_in_a_child(tmp_path: Path) -> None:
    path = seccomp.build(tmp_path / "filter")
    ran = subprocess.run(
        [sys.executable, "-c", TRY, str(path), ",".join(REFUSED), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (tmp_path / "fifo").unlink()
    found = json.loads(ran.stdout)
    for name in REFUSED:
        assert found.get(name, "EPERM") == "EPERM", name
    assert {key: found[key] for key in ("swapext", "snap_create", "tiocsti", "clone newuser", "device", "personality")} == dict.fromkeys(
        ("swapext", "snap_create", "tiocsti", "clone newuser", "device", "personality"), "EPERM"
    )
    assert [found[f"socket {family}"] for family in (17, 38, 40)] == ["EAFNOSUPPORT"] * 3 and found["netfilter"] == "EPROTONOSUPPORT"
    assert [found[key] for key in ("netlink", "tcp", "socketpair", "fifo", "thread")] == ["ok"] * 5
    assert found["child"] == 7


@pytest.mark.skipif(platform.machine() != "x86_64", reason="i386 calls: x86_64 only")
def test_i386_calls_are_unknown(tmp_path: Path) -> None:
    """`int 0x80` reaches the 32-bit table: mount is number 21 there and must not get through."""
    source = tmp_path / "t.c"
    source.write_text(
        "#include <errno.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <sys/prctl.h>\n#include <linux/filter.h>\n"
        'int main(int c, char **v) { static struct sock_filter f[4096]; FILE *in = fopen(v[1], "rb"); size_t n = fread(f, 8, 4096, in);\n'
        "struct sock_fprog p = {(unsigned short)n, f}; if (prctl(38, 1, 0, 0, 0) || prctl(22, 2, &p)) return 1; long r;\n"
        '__asm__ volatile("int $0x80" : "=a"(r) : "0"(20)); printf("%ld", r); return 0; }\n'
    )
    subprocess.run(["gcc", "-o", str(tmp_path / "t"), str(source)], check=True)
    filter_path = seccomp.build(tmp_path / "filter")
    ran = subprocess.run([str(tmp_path / "t"), str(filter_path)], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == -38
