"""Drives the launcher and aethers directly over their sockets, without edge or apiserver, for the tests of the native side."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.edge import wire
from dsec.edge.wire import Fields, Frame
from dsec.guard import seccomp
from dsec.linux.cgroups import remove_group

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("DSEC_TEST_AETHER") or ROOT / "native" / "build" / "aether")  # or another build of it, as with sanitizers
UID_BASE = 200_000
APPLETS = (
    "sh cat echo ls id pwd sleep true false kill ps env mkdir dd wc stat head grep touch chmod ln mount umount unshare hostname nc ping"
)
_ids = itertools.count(1)


class Refused(Exception):
    """An ERROR frame."""

    def __init__(self, payload: bytes) -> None:
        fields = Fields(payload)
        self.code = fields.text(wire.T_CODE)
        super().__init__(f"{self.code}: {fields.text(wire.T_MESSAGE)}")


def base_layer(directory: Path, extra: dict[str, str] | None = None) -> Path:
    """A layer of a static busybox, built as an EROFS image."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox (package busybox-static) is needed")
    root = directory / "rootfs"
    for name in ("bin", "etc", "proc", "dev", "srv", "home/app"):
        (root / name).mkdir(parents=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in APPLETS.split():
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\napp:x:1000:\nextra:x:1500:app\ndisk:x:6:root\n")
    for path, content in (extra or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
        (root / path).chmod(0o755)
    os.chown(root / "home/app", 1000, 1000)
    image = directory / "base.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", str(image), str(root)], check=True, stdout=subprocess.DEVNULL)
    return image


def unused_id() -> str:
    """A sandbox id."""
    return f"t{os.getpid():x}x{next(_ids)}".ljust(20, "0")


class Connection:
    """A stream connection to an aether."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(path))
        self._numbers = itertools.count(1)
        reply = self.call(wire.F_HELLO, wire.u64(wire.T_VERSION_MAJOR, wire.WIRE_MAJOR) + wire.u64(wire.T_VERSION_MINOR, wire.WIRE_MINOR))
        assert reply.type == wire.F_HELLO

    def close(self) -> None:
        self.sock.close()

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise ConnectionError("aether closed the connection")
            data += more
        return data

    def receive(self) -> Frame:
        head = self._take(4)
        frame = wire.single(head + self._take(int.from_bytes(head, "little")))
        if frame.type == wire.F_ERROR:
            raise Refused(frame.payload)
        return frame

    def call(self, kind: int, payload: bytes = b"") -> Frame:
        self.sock.sendall(wire.frame(kind, next(self._numbers), payload))
        return self.receive()

    def run(
        self,
        *argv: str,
        shell: str | None = None,
        user: str | None = None,
        cwd: str | None = None,
        env: tuple[str, ...] = (),
        flags: int = 0,
    ) -> tuple[int, str]:
        """A command to its end: exit code and output (both streams)."""
        payload = wire.text(wire.T_COMMAND, unused_id()) + wire.u64(wire.T_EXEC_FLAGS, wire.X_COLLECT | wire.X_MERGE | flags)
        payload += wire.text(wire.T_SHELL, shell) if shell is not None else b"".join(wire.text(wire.T_ARG, a) for a in argv)
        for tag, value in ((wire.T_USER, user), (wire.T_CWD, cwd)):
            payload += wire.text(tag, value) if value is not None else b""
        payload += b"".join(wire.text(wire.T_ENV, entry) for entry in env)
        frame = self.call(wire.F_EXEC, payload)
        while frame.type != wire.F_END:
            frame = self.receive()
        fields = Fields(frame.payload)
        record = wire.record(fields.bytes(wire.T_RECORD) or b"")
        output = record.stdout or fields.bytes(wire.T_STDOUT) or b""
        return record.code, output.decode(errors="replace")

    def background(self, *argv: str) -> None:
        """Start a command and go on."""
        payload = wire.text(wire.T_COMMAND, unused_id()) + wire.u64(wire.T_EXEC_FLAGS, 0)
        frame = self.call(wire.F_EXEC, payload + b"".join(wire.text(wire.T_ARG, a) for a in argv))
        assert frame.type == wire.F_STARTED

    def out(self, text: str, **kw: str) -> str:
        """Output of a shell text that has to succeed."""
        code, output = self.run(shell=text, **kw)  # type: ignore[arg-type]
        assert code == 0, (code, output)
        return output


class Driver:
    """A launcher of its own with its own directories and cgroup parent."""

    def __init__(self, home: Path, binary: Path = BINARY, medium_mb: int = 1024) -> None:
        self.home, self.binary, self.medium_mb = home, binary, medium_mb
        self.run, self.state = home / "run", home / "state"
        self.cgroup = f"dsec-n{os.getpid():x}x{next(_ids)}"
        self.run.mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True)
        self.filter = seccomp.build(self.run / "seccomp.bpf")
        self._numbers = itertools.count(1)
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] | None = None  # more of it

    def start(self, join: int | None = None, *more: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = ["launcher", "--run", str(self.run), "--state", str(self.state), "--cgroup", self.cgroup, "--seccomp", str(self.filter)]
        argv += [*(["--join", str(join)] if join else []), *more]
        self.process = subprocess.Popen(  # the shell puts the socket where the launcher expects it
            ["/bin/bash", "-c", f'exec "$0" "$@" 3<&{theirs.fileno()}' + (f" {theirs.fileno()}<&-" if theirs.fileno() != 3 else ""),
             self.binary, *argv],
            pass_fds=[theirs.fileno()], env={**os.environ, **(self.env or {})}, stderr=open(self.home / "launcher.err", "ab"),
        )  # fmt: skip
        theirs.close()
        self.sock = ours
        self.sock.settimeout(60)

    def send(self, kind: int, payload: bytes = b"") -> int:
        number = next(self._numbers)
        self.sock.send(wire.frame(kind, number, payload))
        return number

    def receive(self) -> Frame:
        frame = wire.single(self.sock.recv(1 << 20))
        if frame.type == wire.F_ERROR:
            raise Refused(frame.payload)
        return frame

    def call(self, kind: int, payload: bytes = b"") -> Frame:
        number = self.send(kind, payload)
        frame = self.receive()
        assert frame.request == number
        return frame

    def mount_medium(self) -> None:
        self.call(
            wire.F_MOUNT_MEDIUM, wire.text(wire.T_PATH, str(self.state / "medium.btrfs")) + wire.u64(wire.T_SIZE, self.medium_mb << 20)
        )

    def mount_layer(self, name: str, path: Path) -> None:
        self.call(wire.F_MOUNT_LAYER, wire.text(wire.T_NAME, name) + wire.text(wire.T_PATH, str(path)))

    def directories(self, sandbox: str) -> bytes:
        return wire.text(wire.T_RUN_DIR, str(self.run / sandbox)) + wire.text(wire.T_STATE_DIR, str(self.state / "sandboxes" / sandbox))

    def spec(self, sandbox: str, layers: tuple[str, ...] = ("base",), **change: int | str | list[str]) -> bytes:
        values: dict[str, int | str | list[str]] = {  # what a test does not care about
            "uid_base": UID_BASE, "hostname": "box", "memory_bytes": 256 << 20, "disk_bytes": 64 << 20, "pids": 64, "cpu_milli": 2000,
            "nofile": 1024, "shm_bytes": 16 << 20, "log_head": 65536, "log_tail": 65536, "log_budget": 1 << 24, "userns": 1, "medium": 0,
        }  # fmt: skip
        values.update(change)
        payload = wire.text(wire.T_ID, sandbox) + self.directories(sandbox) + b"".join(wire.text(wire.T_LAYER, name) for name in layers)
        for name, value in values.items():
            tag = getattr(wire, f"T_{name.upper()}")
            for one in value if isinstance(value, list) else [value]:
                payload += wire.u64(tag, one) if isinstance(one, int) else wire.text(tag, one)
        return payload

    def create(self, sandbox: str | None = None, **change: int | str | list[str]) -> Sandbox:
        sandbox = sandbox or unused_id()
        fields = Fields(self.call(wire.F_CREATE, self.spec(sandbox, **change)).payload)  # type: ignore[arg-type]
        return Sandbox(self, sandbox, fields.u64(wire.T_PID), fields.u64(wire.T_INIT_PID))

    def reap(self, sandbox: str) -> None:
        self.call(wire.F_REAP, wire.text(wire.T_ID, sandbox) + self.directories(sandbox))

    def close(self) -> None:
        """The launcher leaves when its socket closes."""
        if self.process is not None:
            self.sock.close()
            self.process.wait(10)
            self.process = None

    def remains(self) -> list[str]:
        """Cgroups of ours, run directories and writable layers that are still there."""
        groups = [str(p) for parent in self.parents() for p in parent.iterdir() if p.is_dir()]
        layers: list[str] = []
        if self.process is not None and self.process.poll() is None:
            medium = Path(f"/proc/{self.process.pid}/root/.node/medium")
            layers = [str(p) for p in medium.iterdir()] if medium.is_dir() else []
        return groups + layers + [str(p) for p in self.run.iterdir() if p.is_dir()]

    def remove_groups(self) -> None:
        for parent in self.parents():
            remove_group(parent)

    def parents(self) -> list[Path]:
        """Our directory in every cgroup hierarchy."""
        root = Path("/sys/fs/cgroup")
        bases = (root, *(h for h in root.iterdir() if h.is_dir()))
        return [p for base in bases for p in (base / self.cgroup, base / f"{self.cgroup}-idle") if p.is_dir()]


class Sandbox:
    """A sandbox that is ready."""

    def __init__(self, driver: Driver, name: str, pid: int, init: int) -> None:
        self.driver, self.id, self.pid, self.init = driver, name, pid, init
        self.connection = Connection(driver.run / name / "aether.sock")

    def stop(self) -> None:
        frame = self.connection.call(wire.F_STOP)
        assert frame.type == wire.F_ENDED
        self.connection.close()


@contextmanager
def driver(
    medium: bool = True, extra: dict[str, str] | None = None, directory: str | None = None, more: tuple[str, ...] = (),
    binary: Path = BINARY, env: dict[str, str] | None = None,
) -> Iterator[Driver]:
    """A started launcher with one layer, `base`, in a directory of its own; proves at the end that nothing is left."""
    home = Path(tempfile.mkdtemp(prefix="dsec-native-", dir=directory))
    d = Driver(home, binary)
    d.env = env
    try:
        image = base_layer(home, extra)
        d.start(None, *more)
        if medium:
            d.mount_medium()
        d.mount_layer("base", image)
        yield d
        left = d.remains()
        assert not left, left
    finally:
        if d.process is not None and d.process.poll() is None:
            for name in sorted({Path(path).name for path in d.remains()}):  # of a test that failed
                d.reap(name)
        d.close()
        until = time.monotonic() + 5
        while d.remains() and time.monotonic() < until:
            time.sleep(0.02)
        left = d.remains()
        if not left:
            d.remove_groups()
        shutil.rmtree(home, ignore_errors=True)
    assert not left, left
