"""Hostile function calls: one plants something or attacks, the next looks for it. Both run in the same resident, one after the other or side
by side, and the looker must find what it would have found had the other never been."""
from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from libdsec import DSecClient, FnCallArgs, FnLimits

LIBC = "import ctypes, os, socket, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
DAEMON = "\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\n    os._exit(0)\n"
# what both sides can write to, by trying
EVERYWHERE = """
import os
places = [d for d, _, _ in os.walk('/') if not d.startswith('/proc')]
"""
PLANTS = {
    "files in every place that can be written to": (
        EVERYWHERE + "n = 0\nfor d in places:\n    try: open(d + '/planted', 'w').write('x'); n += 1\n    except OSError: pass\nassert n >= 4, n",
        EVERYWHERE + "print([d for d in places if os.path.exists(d + '/planted')])",
        "[]",
    ),
    "the interpreter's own files": (
        "import json, os, sys\nfor path in (json.__file__, sys.executable, '/usr/bin/env', '/bin/sh', '/etc/passwd'):\n"
        "    for act in (lambda: open(path, 'r+b'), lambda: os.unlink(path), lambda: os.rename(path, path + '2'), lambda: os.chmod(path, 0o777)):\n"
        "        try: act()\n        except OSError as e: assert e.errno in (13, 1, 30), e\n        else: raise SystemExit(path)",
        "import json; print(json.loads('[1]'))",
        "[1]",
    ),
    "modules and builtins in memory": (
        "import json, builtins, sys, os\njson.loads = None; builtins.print = None; sys.path.append('/evil'); os.environ['EVIL'] = '1'; sys.modules['evil'] = 1",
        "import json, sys, os; print(json.loads('[1]'), '/evil' in sys.path, 'EVIL' in os.environ, 'evil' in sys.modules)",
        "[1] False False False",
    ),
    "a process that goes on": (
        LIBC + DAEMON + "print('left')",
        "import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()), os.getpid(), os.getppid())",
        "['1', '3'] 3 0",
    ),
    "a thread and a timer": (
        "import threading, time, signal\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start(); signal.setitimer(signal.ITIMER_REAL, 0.2)",
        "import threading, time; time.sleep(0.3); print(threading.active_count(), len(__import__('os').listdir('/proc/self/task')))",
        "1 1",
    ),
    "System V shared memory, semaphores, messages": (
        LIBC + "assert libc.shmget(4242, 4096, 0o1666) >= 0 and libc.semget(4242, 1, 0o1666) >= 0 and libc.msgget(4242, 0o1666) >= 0",
        LIBC + "print(libc.shmget(4242, 4096, 0), libc.semget(4242, 1, 0), libc.msgget(4242, 0))",
        "-1 -1 -1",
    ),
    "POSIX shared memory and message queues": (
        LIBC + "rt = ctypes.CDLL('librt.so.1')\nopen('/dev/shm/planted', 'w').write('x'); assert rt.mq_open(b'/planted', 0o102, 0o666, None) >= 0",
        LIBC + "rt = ctypes.CDLL('librt.so.1')\nprint(os.listdir('/dev/shm'), rt.mq_open(b'/planted', 0))",
        "[] -1",
    ),
    "an abstract socket and a port that somebody holds": (
        LIBC + "a = socket.socket(socket.AF_UNIX); a.bind('\\0planted'); a.listen()\nb = socket.socket(); b.bind(('127.0.0.1', 4242)); b.listen()" + DAEMON,
        LIBC + "for s, to in ((socket.socket(socket.AF_UNIX), '\\0planted'), (socket.socket(), ('127.0.0.1', 4242))):\n"
        "    try: s.connect(to); print('connected')\n    except ConnectionRefusedError: print('refused')\n"
        "print(len(open('/proc/self/net/tcp').readlines()), len(open('/proc/self/net/unix').readlines()))",
        "refused\nrefused\n1 1",
    ),
    "open descriptors": (
        "import os\nfds = [os.open('/box', os.O_RDONLY) for _ in range(20)]\nfor fd in fds: os.set_inheritable(fd, True)",
        "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1])",
        "[0, 1, 2, 3]",
    ),
    "a kill of everybody, and of the process group": (
        "import os, signal\nfor who in (lambda: os.kill(-1, 9), lambda: os.kill(1, 9), lambda: os.killpg(0, 0), lambda: os.kill(0, 0)):\n"
        "    try: who()\n    except OSError: pass",
        "print('alive')",
        "alive",
    ),
    "tracing and writing to every process number": (
        LIBC + "class io(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "buf = ctypes.create_string_buffer(8); l = io(ctypes.addressof(buf), 8); r = io(0x400000, 8); got = []\n"
        "for pid in range(0, 3000):\n"
        "    if pid != os.getpid() and (libc.ptrace(16, pid, 0, 0) == 0 or libc.process_vm_readv(pid, ctypes.byref(l), 1, ctypes.byref(r), 1, 0) >= 0"
        " or libc.process_vm_writev(pid, ctypes.byref(l), 1, ctypes.byref(r), 1, 0) >= 0): got.append(pid)\n"
        "for name in ('mem', 'environ', 'maps', 'root', 'cwd', 'fd', 'ns/mnt'):\n"
        "    try: os.open(f'/proc/1/{name}', os.O_RDONLY); got.append(name)\n    except OSError: pass\nassert got == [], got",
        "print('alive')",
        "alive",
    ),
    "namespaces, mounts, host name, limits, keys": (
        LIBC + "os.mkdir('/tmp/m')\n"
        "for call in (lambda: libc.setns(os.open('/proc/self/ns/uts', 0), 0), lambda: libc.unshare(0x10000000), lambda: libc.mount(b'x', b'/tmp/m', b'tmpfs', 0, None),"
        " lambda: libc.sethostname(b'evil', 4), lambda: libc.umount2(b'/box', 2), lambda: libc.chroot(b'/tmp'), lambda: libc.setuid(0), lambda: libc.setgid(0),"
        " lambda: libc.syscall(248, b'user', b'planted', b'x', 1, -4), lambda: libc.swapon(b'/tmp/m', 0)):\n    assert call() == -1, call\n",
        LIBC + "print(socket.gethostname(), os.getuid() == os.getgid() >= 20000, os.getgroups())",
        "fncall True []",
    ),
}


@pytest.fixture
def python(client: DSecClient, python_image: str) -> Callable[..., Any]:
    async def run(code: str, **fields: Any) -> Any:
        return await client.run_fncall(FnCallArgs(image=python_image, code=textwrap.dedent(code), **fields), timeout=60)

    return run


@pytest.mark.parametrize("what", PLANTS)
async def test_the_next_call_finds_nothing(python: Callable[..., Any], what: str) -> None:
    plant, look, clean = PLANTS[what]
    assert (before := await python(look)).ok, before.stderr_text
    assert before.stdout_text.strip() == clean
    planted = await python(plant)
    assert planted.ok or planted.signal or what.startswith("a thread"), planted.stderr_text
    for _ in range(3):  # boxes made before the plant ran, and after
        after = await python(look)
        assert after.stdout_text.strip() == clean, after.stderr_text


async def test_the_one_beside_it_finds_nothing_either(python: Callable[..., Any]) -> None:
    plant = LIBC + textwrap.dedent("""
        open('/tmp/planted', 'w').write('x'); open('/dev/shm/planted', 'w').write('x')
        a = socket.socket(socket.AF_UNIX); a.bind('\\0planted'); a.listen()
        libc.shmget(4242, 4096, 0o1666)
        time.sleep(2)
    """)
    look = LIBC + textwrap.dedent("""
        time.sleep(0.5)
        try: socket.socket(socket.AF_UNIX).connect('\\0planted'); found = True
        except ConnectionRefusedError: found = False
        print(os.listdir('/tmp'), os.listdir('/dev/shm'), found, libc.shmget(4242, 4096, 0), sorted(p for p in os.listdir('/proc') if p.isdigit()))
    """)
    planted, looked = await asyncio.gather(python(plant), python(look))
    assert planted.ok, planted.stderr_text
    assert looked.stdout_text.strip() == "[] [] False -1 ['1', '3']", looked.stderr_text


async def test_memory_holds_nothing_of_an_earlier_call(python: Callable[..., Any]) -> None:
    secret = "planted-secret-" + "0123456789abcdef" * 2
    planted = await python(f"x = [bytes({secret!r}, 'ascii') * 1000 for _ in range(200)]; print(len(x), input())", stdin=secret, env={"SECRET": secret},
                           argv=[secret], files={"s": secret})  # fmt: skip
    assert planted.ok
    look = """
        import re, resource
        pattern = re.compile(bytes(c ^ 1 for c in b'qm`oude,rdbsdu,') + b'[0-9a-f]{32}')
        found = []
        with open('/proc/self/mem', 'rb', 0) as mem:
            for line in open('/proc/self/maps'):
                words = line.split()
                begin, end = (int(x, 16) for x in words[0].split('-'))
                if words[1][0] != 'r' or line.rstrip().endswith(('[vvar]', '[vsyscall]', '[vvar_vclock]')): continue
                mem.seek(begin)
                found += pattern.findall(mem.read(end - begin))
        print(len(found))
    """
    own = await python("y = bytes('planted-secret-' + 'f' * 32, 'ascii')\n" + textwrap.dedent(look))
    assert int(own.stdout) > 0, own.stderr_text  # it would be found
    assert (await python(look)).stdout == b"0\n"


async def test_what_the_kernel_tells_of_others_is_not_there(python: Callable[..., Any]) -> None:
    got = await python("import os; print(sorted(n for n in os.listdir('/proc') if not n.isdigit()), os.path.exists('/sys/kernel'), open('/proc/self/cgroup').read())")
    assert got.stdout_text.startswith("['self', 'thread-self'] False") and "dsec" not in got.stdout_text and ".." not in got.stdout_text


async def test_random_numbers_differ(python: Callable[..., Any]) -> None:
    got = [(await python("import random, uuid, os, tempfile; print(random.random(), uuid.uuid4(), os.urandom(4), tempfile.mktemp())")).stdout for _ in range(4)]
    assert len(set(got)) == 4


async def test_a_flood_is_stopped_and_the_next_call_runs(python: Callable[..., Any]) -> None:
    bomb = await python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=FnLimits(wall=1, pids=40))
    assert "pids" in bomb.limits_hit and "wall" in bomb.limits_hit
    assert (await python("print(1)")).stdout == b"1\n"
    liar = await python("import os\nos.write(3, b'\\x00lies'); os.write(3, b'[1' * 1000); os.close(3)\ndef f(): pass", entry="f")
    assert not liar.ok and liar.value is None  # its own result is its own affair; nobody else's
    assert (await python("def f(): return 5", entry="f")).value == 5
