"""C42-C44 and rule 32: the platform against its guest."""
from __future__ import annotations

import json

from libdsec import DSecClient, Sandbox

from .conftest import MakeBox

SWAPEXT = """
import errno, fcntl, os
open('/tmp/a', 'w').write('a'); open('/tmp/b', 'w').write('b')
fd = os.open('/tmp/a', os.O_RDWR)
for name, number in {'XFS_IOC_SWAPEXT': 0xC0C0586D, 'EXT4_IOC_MOVE_EXT': 0xC028660F, 'XFS_IOC_EXCHANGE_RANGE': 0x40285881,
                     'BTRFS_IOC_SNAP_CREATE': 0x50009401, 'BTRFS_IOC_QGROUP_LIMIT': 0x8030942B}.items():
    try:
        fcntl.ioctl(fd, number, bytearray(4096)); print(name, 'allowed')
    except OSError as e:
        print(name, errno.errorcode[e.errno])
"""

LOOK = r"""
import glob, json, os
found = {'processes': {}, 'mounts': open('/proc/self/mountinfo').read(), 'env': open('/proc/self/environ').read(),
         'sockets': open('/proc/net/unix').read(), 'fds': {}, 'tcp': open('/proc/net/tcp').read()}
for p in glob.glob('/proc/[0-9]*'):
    try:
        found['processes'][p] = open(p + '/cmdline').read()
    except OSError as e:
        found['processes'][p] = repr(e)
for fd in os.listdir('/proc/self/fd'):
    try:
        found['fds'][fd] = os.readlink('/proc/self/fd/' + fd)
    except OSError:
        pass
files = []
for top, dirs, names in os.walk('/'):
    dirs[:] = [d for d in dirs if not (top == '/' and d in ('proc', 'sys'))]
    files += [os.path.join(top, n) for n in names + dirs if any(a + b in n.lower() for a, b in (('ds', 'ec'), ('aet', 'her'), ('chro', 'nus')))]
found['files'] = files
print(json.dumps(found))
"""


async def test_c42_recursive_read_of_everything_harms_nothing(box: Sandbox, client: DSecClient) -> None:
    # a process's own pagemap has an entry for every page that it could have: 256 GiB, which no kernel feature hides by name
    read = await box.run_shell("grep -r --exclude=pagemap needle / > /dev/null 2>&1", timeout=120)
    assert read.ending.value == "exited", "it comes to its end"
    await box.run_shell("timeout 2 cat /proc/self/pagemap > /dev/null")
    assert (await box.run_shell("echo alive")).stdout == b"alive\n"
    masked = await box.run_shell("for f in kcore kpagecount kpagecgroup kpageflags keys timer_list; do cat /proc/$f 2>/dev/null | head -c 64 | wc -c; done")
    assert set(masked.stdout.split()) <= {b"0"}
    assert (await box.run_shell("echo 1 > /proc/sysrq-trigger; echo x > /proc/sys/kernel/core_pattern; true")).exit_code == 0
    writable = await box.run_shell("echo core > /proc/sys/kernel/core_pattern")
    assert writable.exit_code != 0


async def test_c43_a_replaced_shell_changes_no_verdict_of_the_platform(make_box: MakeBox, client: DSecClient) -> None:
    box = await make_box()
    await box.run_shell("cp /bin/true /tmp/t; cat /tmp/t > /bin/bash; cp /tmp/t /bin/sh")
    result = await box.exec(["python3", "-c", "import sys; print('checked'); sys.exit(3)"])
    assert (result.exit_code, result.stdout) == (3, b"checked\n"), "exec of an argv uses no shell"
    await box.files.write("/tmp/x", "1")
    assert await box.files.read("/tmp/x") == b"1", "files use nothing of the sandbox"
    said = await box.run_shell("echo really run; exit 5")
    assert said.shell_replaced
    assert (await client.info(box.id)).health == "damaged"
    fresh = await make_box()
    assert (await fresh.run_shell("exit 5")).exit_code == 5, "lower layers are shared and untouched"


async def test_c44_extent_swap_is_refused(box: Sandbox) -> None:
    lines = (await box.exec(["python3", "-c", SWAPEXT])).stdout.decode().splitlines()
    assert len(lines) == 5
    assert all(line.split()[1] in ("EPERM", "ENOTTY", "ENOSYS") for line in lines), lines


async def test_rule_32_nothing_of_the_platform_is_inside(box: Sandbox) -> None:
    found = json.loads((await box.exec(["python3", "-c", LOOK], timeout=60)).stdout)
    assert found["files"] == []
    for text in (found["mounts"], found["env"], found["sockets"], json.dumps(found["processes"]), json.dumps(found["fds"])):
        for word in ("dsec", "aether", "chronus"):
            assert word not in text.lower(), text
    assert len(found["processes"]) == 2, "PID 1 and the command itself"
    assert len(found["sockets"].splitlines()) == 1, "only the header line"
    assert set(found["fds"]) <= {"0", "1", "2", "3"}


async def test_identity_and_privileges(box: Sandbox) -> None:
    status = dict(line.split(":\t", 1) for line in (await box.exec(["cat", "/proc/self/status"])).stdout.decode().splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert int(status["CapBnd"], 16) & ~0x800405FB == 0 or int(status["CapBnd"], 16) & (1 << 21 | 1 << 27 | 1 << 13 | 1 << 12) == 0
    uid_map = (await box.exec(["cat", "/proc/self/uid_map"])).stdout.split()
    assert uid_map[0] == b"0" and int(uid_map[1]) >= 100000, "root inside is nobody outside"
    devices = set((await box.run_shell("find /dev -type c -o -type b | xargs -n1 basename")).stdout.decode().split())
    assert devices <= {"null", "zero", "full", "random", "urandom", "tty", "ptmx"} | {str(i) for i in range(10)}
