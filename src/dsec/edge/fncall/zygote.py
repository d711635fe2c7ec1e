"""The program of the resident interpreter. It is run by the environment's own Python (3.9 or newer), inside the container, with
`-I -B -c SOURCE MODULE...`, and so uses nothing of dsec.

It imports the modules and waits. For each call it forks a child, which moves into the call's box, gives up every right, says so with one
byte, and waits for its job; nothing of the caller's has run or been read until then. What happens in the child stays there: the parent
learns only that it ended. native/fnzygote.c is the other end.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

CONTROL, VALUE, JOB, FIRST_FREE = 3, 3, 4, 5
NEWPID = 0x20000000
SECCOMP, CLOSE_RANGE, SETNS, PR_SET_DUMPABLE = 317, 436, 308, 4
ARM = struct.Struct("<c3xIQ")
ENDED = struct.Struct("<c3xiQQ")
FDS = 16
# Beside the filter that all of us have: what our one more right is for is done. Load the number; setns: EPERM; anything else: as before.
CODE = ctypes.create_string_buffer(
    b"".join(struct.pack("<HBBI", *line) for line in ((0x20, 0, 0, 0), (0x15, 0, 1, SETNS), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)))
)
PROGRAM = struct.pack("@HxxxxxxQ", 4, ctypes.addressof(CODE))
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    control = socket.socket(fileno=CONTROL)
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.disable()
    gc.freeze()  # what is here stays shared with every child
    control.send(b"R")
    serve(control)


def serve(control: socket.socket) -> None:
    poll = select.poll()
    children: dict[int, tuple[int, int]] = {}
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == CONTROL:
                message, fds, _, _ = socket.recv_fds(control, ARM.size, FDS)
                if not message:
                    return
                _, uid, serial = ARM.unpack(message)
                pid = born(fds, uid)
                for each in fds:
                    os.close(each)
                if pid < 0:
                    control.send(ENDED.pack(b"E", 70 << 8, serial, 0))
                    continue
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid, serial
                poll.register(pidfd, select.POLLIN)
            else:
                pid, serial = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _, status, usage = os.wait4(pid, 0)
                control.send(ENDED.pack(b"E", status, serial, usage.ru_maxrss << 10))


def born(fds: list[int], uid: int) -> int:
    """A child in the pid namespace of the box; -1 when that is gone already."""
    if libc.setns(fds[0], NEWPID) < 0:
        return -1
    try:
        pid = os.fork()
    except OSError:
        return -1
    if pid:
        return pid
    status = 70
    try:
        enter(fds, uid)
        job = read_all(JOB)
        os.close(JOB)
        if job:
            status = run(json.loads(job))
    except BaseException as error:
        os.write(VALUE, b"\0" + repr(error).encode()[:200])
    finally:
        os._exit(status)


def enter(fds: list[int], uid: int) -> None:
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds[1:]]
    spaces, streams, groups = high[:5], high[5:10], high[10:]
    for fd, place in zip(streams, (0, 1, 2, VALUE, JOB)):  # noqa: B905 - 3.9 has no strict
        os.dup2(fd, place)
    for group in groups:
        os.write(group, b"0")
    for fd in spaces:
        check(libc.setns(fd, 0), "join the box")
    check(libc.syscall(CLOSE_RANGE, FIRST_FREE, ctypes.c_uint(0xFFFFFFFF), 0), "close the descriptors")
    os.set_inheritable(VALUE, False)
    os.set_inheritable(JOB, False)
    os.setsid()  # a signal to its process group shall not go to ours
    os.chdir("/box")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    check(libc.syscall(SECCOMP, 1, 0, PROGRAM), "load the system call filter")
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "become dumpable")
    os.umask(0o022)
    rehearse()
    os.write(VALUE, b"\1")


def rehearse() -> None:
    """Writes to the memory that every job writes to: a page that is shared with the parent costs a copy, which no call shall wait for."""
    scope = json.loads('{"a": [1, "b"], "c": {}}')
    exec(compile("def f(x):\n    return sum(i * i for i in range(x))\nf(3)\n", "main.py", "exec", dont_inherit=True), scope)
    json.dumps(scope["a"])


def read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while True:
        part = os.read(fd, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def run(job: dict[str, Any]) -> int:
    """The exit status, as the interpreter would have it."""
    for name, value in job["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or value <= hard:
            resource.setrlimit(kind, (value, value))
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv[:] = [job["name"], *job["argv"]]
    sys.path.insert(0, "/box")
    reseed()
    gc.enable()
    module = types.ModuleType("__main__")
    module.__file__ = job["name"]
    sys.modules["__main__"] = module
    status = guarded(lambda: work(module, job))
    status = guarded(end) or status
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = status or 120
    return status


def work(module: types.ModuleType, job: dict[str, Any]) -> None:
    exec(compile(job["code"], job["name"], "exec", dont_inherit=True), module.__dict__)
    if job["entry"]:
        value = getattr(module, job["entry"])(*job["args"], **job["kwargs"])
        data = memoryview(json.dumps(value).encode())
        while data:
            data = data[os.write(VALUE, data) :]


def end() -> None:
    """What an interpreter does before it takes itself apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def guarded(what: Callable[[], object]) -> int:
    try:
        what()
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1


def reseed() -> None:
    """Generators that were seeded before the fork would give every call the same numbers. Python's own reseeds itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


main()
