"""The native side without edge: the launcher, the making, entering and removal of sandboxes, and what must hold when something dies."""
from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.harness import until
from tests.system.native_driver import UID_BASE, Connection, Driver, Refused, Sandbox, driver, unused_id

from dsec.edge import wire
from dsec.edge.wire import Fields

pytestmark = pytest.mark.root
EXTRA = {
    "bin/broken": "#!/no/such/interpreter\n",
    "bin/plain": "no interpreter line\n",
    "bin/script": "#!/bin/sh\necho script $1\n",
}


@pytest.fixture(scope="module")
def native() -> Iterator[Driver]:
    with driver(extra=EXTRA) as d:
        yield d


@pytest.fixture
def box(native: Driver) -> Iterator[Sandbox]:
    sandbox = native.create()
    yield sandbox
    sandbox.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def dead(pid: int) -> bool:
    return not alive(pid)


# what is inside ---------------------------------------------------------------------------------------------------------------------


def test_identity_and_environment(native: Driver) -> None:
    box = native.create(env=["PATH=/opt/x:/bin", "FOO=bar"], user="app", workdir="/srv")
    try:
        assert box.connection.out("id -u; id -g; id -G; pwd; echo $PATH $FOO $HOME $HOSTNAME; umask; cat /etc/hostname; hostname") == (
            "1000\n1000\n1000 1500\n/srv\n/opt/x:/bin bar /home/app box\n0022\nbox\nbox\n"
        )
        assert box.connection.run("/bin/sh", "-c", "echo $FOO", env=("FOO=z",))[1] == "z\n"
        assert box.connection.out("id -u; id -g", user="0:1500") == "0\n1500\n"
        assert box.connection.out("id -u; id -g", user="1234:app") == "1234\n1000\n"
        assert box.connection.out("pwd", cwd="/tmp", user="root") == "/tmp\n"
    finally:
        box.stop()


def test_only_pid_1_and_the_command_are_visible(box: Sandbox) -> None:
    lines = box.connection.out("ps -o pid,comm").split("\n")[1:-1]
    assert lines[0].split() == ["1", "init"]
    assert [line.split()[1] for line in lines[1:]] in (["sh"], ["ps"], ["sh", "ps"])
    # no descriptor but the three, nothing of PID 1 can be read
    assert box.connection.out("ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3: the directory itself
    for name in ("environ", "maps", "exe", "fd", "root"):
        assert box.connection.run(shell=f"cat /proc/1/{name} || ls /proc/1/{name}/")[0] != 0
    mounts = box.connection.out("cat /proc/self/mountinfo")
    for secret in (str(native_home(box)), "medium", "layers", ".node"):
        assert secret not in mounts


def native_home(box: Sandbox) -> Path:
    return box.driver.home


def test_root_inside_is_nobody_outside_and_has_little(box: Sandbox) -> None:
    box.connection.out("sleep 30 > /dev/null 2>&1 & touch /tmp/mine")
    inside = [p for p in Path(f"/proc/{box.init}/task/{box.init}").parent.parent.parent.glob("[0-9]*") if owned(p)]
    assert inside
    status = dict(line.split(":", 1) for line in box.connection.out("cat /proc/self/status").splitlines() if ":" in line)
    assert status["CapEff"].strip() == status["CapBnd"].strip() == "00000000a00405fb"
    assert status["CapAmb"].strip() == status["CapInh"].strip() == "0" * 16
    assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2"
    for attempt in ("mount -t tmpfs x /tmp", "unshare -U true", "unshare -m true", "hostname other", "kill -9 1 && ! sleep 0",
                    "echo 1 > /proc/sys/kernel/printk", "echo x > /proc/1/oom_score_adj", "grep -q . /proc/kallsyms"):  # fmt: skip
        assert box.connection.run(shell=attempt)[0] != 0, attempt
    assert box.connection.out("echo still here") == "still here\n"


def owned(process: Path) -> bool:
    try:
        return process.stat().st_uid == UID_BASE
    except FileNotFoundError:
        return False


def test_devices_and_temporary_places(box: Sandbox) -> None:
    assert box.connection.out("ls /dev").split() == sorted(
        ["fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    )
    text = "echo x > /dev/null; head -c 3 /dev/zero | wc -c; echo hi > /dev/shm/a; cat /dev/shm/a; echo t > /tmp/t; cat /tmp/t"
    out = box.connection.out(text, user="app")
    assert out == "3\nhi\nt\n"
    assert box.connection.run(shell="touch /dev/x")[0] != 0


def test_network_is_loopback_only_with_low_ports(box: Sandbox) -> None:
    assert "lo:" in box.connection.out("cat /proc/net/dev") and len(box.connection.out("cat /proc/net/dev").splitlines()) == 3
    text = "(echo hello | nc -l -p 80 > /tmp/got) & sleep 0.3; echo ping | nc -w 1 127.0.0.1 80; wait; cat /tmp/got"
    assert box.connection.out(text, user="app") == "hello\nping\n"


def test_orphans_are_reaped(box: Sandbox) -> None:
    box.connection.out("for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.1 &) ; done")
    time.sleep(0.4)
    assert " Z" not in box.connection.out("ps -o stat,pid")
    assert len(box.connection.out("ps -o pid").split()) <= 4


# errors -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"layers": ("nolayer",)}, "layer_not_found", "nolayer"),
        ({"workdir": "/no/such/dir"}, "cwd_not_found", "/no/such/dir"),
        ({"workdir": "/etc/passwd"}, "cwd_not_found", "/etc/passwd"),
        ({"user": "ghost"}, "user_not_found", "ghost"),
        ({"user": "app:ghosts"}, "user_not_found", "ghosts"),
        ({"user": "70000"}, "user_not_found", "70000"),
        ({"uid_base": 0}, "invalid_request", "UID_BASE"),
        ({"hostname": "x" * 70}, "invalid_request", "host name"),
    ],
)
def test_a_refused_create_leaves_nothing(native: Driver, change: dict[str, str], code: str, names: str) -> None:
    before = native.remains()
    with pytest.raises(Refused, match=names) as error:
        native.create(**change)
    assert error.value.code == code
    assert native.remains() == before


def test_layers_that_are_none(native: Driver, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(1 << 16))
    for path, code in ((tmp_path / "missing", "layer_not_found"), (tmp_path / "noise", "layer_invalid"), (tmp_path, "layer_invalid")):
        with pytest.raises(Refused, match="bad") as error:
            native.mount_layer("bad", path)
        assert error.value.code == code
    with pytest.raises(Refused) as error:
        native.mount_layer("../up", tmp_path / "noise")
    assert error.value.code == "invalid_request"


def test_paths_that_are_not_the_sandbox_s_own_are_refused(native: Driver) -> None:
    payload = wire.text(wire.T_ID, "abc") + wire.text(wire.T_RUN_DIR, str(native.run)) + wire.text(wire.T_STATE_DIR, str(native.state))
    with pytest.raises(Refused, match="RUN_DIR"):
        native.call(wire.F_REAP, payload)
    assert native.run.is_dir()


def test_an_id_in_use_is_refused_and_not_disturbed(native: Driver, box: Sandbox) -> None:
    with pytest.raises(Refused, match="in use"):
        native.create(box.id)
    assert box.connection.out("echo alive") == "alive\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["no-such-program"], "binary_not_found"),
        (["/bin/no-such"], "binary_not_found"),
        (["/bin/broken"], "binary_not_found"),
        (["broken"], "binary_not_found"),
        (["/etc/passwd"], "not_executable"),
        (["/bin"], "not_executable"),
        (["/bin/plain"], "not_executable"),
    ],
)
def test_what_cannot_be_run(box: Sandbox, argv: list[str], code: str) -> None:
    with pytest.raises(Refused) as error:
        box.connection.run(*argv)
    assert error.value.code == code and argv[0].rsplit("/", 1)[-1] in str(error.value)
    assert box.connection.run("script", "x") == (0, "script x\n")


def test_working_directory_and_user_of_a_call(box: Sandbox) -> None:
    for kw, code in (({"cwd": "/nope"}, "cwd_not_found"), ({"user": "ghost"}, "user_not_found")):
        with pytest.raises(Refused) as error:
            box.connection.run("/bin/true", **kw)  # type: ignore[arg-type]
        assert error.value.code == code
    box.connection.out("mkdir /tmp/closed; chmod 700 /tmp/closed")
    with pytest.raises(Refused) as error:
        box.connection.run("/bin/true", cwd="/tmp/closed", user="app")
    assert error.value.code == "permission_denied"


def test_hostile_account_files(box: Sandbox) -> None:
    links = ("ln -s /dev/zero /etc/passwd", "ln -s passwd /etc/passwd")
    for break_it in ("mkfifo /etc/passwd || mkdir /etc/passwd", *links, "head -c 3000000 /dev/zero > /etc/passwd"):
        box.connection.run(shell=f"rm -rf /etc/passwd; {break_it}")
        assert box.connection.out("echo ok") == "ok\n"
        with pytest.raises(Refused) as error:
            box.connection.run("/bin/true", user="app")
        assert error.value.code == "user_not_found"


def test_a_broken_shell_is_named(native: Driver) -> None:
    box = native.create()
    try:
        box.connection.out("rm /bin/sh")
        with pytest.raises(Refused, match="/bin/sh") as error:
            box.connection.run(shell="echo x")
        assert error.value.code == "sandbox_damaged"
        assert box.connection.run("/bin/echo", "argv still works") == (0, "argv still works\n")
    finally:
        box.stop()


# limits -----------------------------------------------------------------------------------------------------------------------------


def usage(box: Sandbox) -> Fields:
    return Fields(box.connection.call(wire.F_STAT).payload)


def test_the_writable_layer_is_bounded_apart_from_memory(native: Driver) -> None:
    box = native.create(memory_bytes=64 << 20, disk_bytes=200 << 20)
    try:
        assert box.connection.run(shell="dd if=/dev/zero of=/big bs=1M count=150")[0] == 0
        code, output = box.connection.run(shell="dd if=/dev/zero of=/more bs=1M count=100")
        assert code == 1 and "quota" in output.lower(), output
        assert usage(box).u64(wire.T_OOM_KILLS) == 0
        assert 140 << 20 < usage(box).u64(wire.T_DISK_USED) <= 200 << 20
        assert box.connection.run(shell="rm /more /big; dd if=/dev/zero of=/big bs=1M count=100")[0] == 0
    finally:
        box.stop()


def test_memory_medium_is_charged_to_the_sandbox(native: Driver) -> None:
    box = native.create(medium=wire.MEDIUM_MEMORY, memory_bytes=256 << 20, disk_bytes=32 << 20)
    try:
        code, output = box.connection.run(shell="dd if=/dev/zero of=/big bs=1M count=64")
        assert code == 1 and "No space" in output
        assert usage(box).u64(wire.T_MEMORY_USED) > 30 << 20
    finally:
        box.stop()


def test_memory_limit_kills_and_is_counted(native: Driver) -> None:
    box = native.create(memory_bytes=48 << 20)
    try:
        code, _ = box.connection.run(shell="x=$(head -c 200000000 /dev/zero | tr '\\0' a 2>/dev/null || cat /dev/zero); echo ${#x}")
        assert code != 0
        until(lambda: usage(box).u64(wire.T_OOM_KILLS) >= 1)
        assert box.connection.out("echo alive") == "alive\n"
    finally:
        box.stop()


def test_process_limit(native: Driver) -> None:
    box = native.create(pids=12)
    try:
        with pytest.raises(Refused) as error:
            for _ in range(13):
                box.connection.background("/bin/sleep", "60")
        assert error.value.code == "pids_limit"
    finally:
        box.stop()


def test_open_files_limit(native: Driver) -> None:
    box = native.create(nofile=100)
    try:
        assert box.connection.out("ulimit -n; ulimit -Hn; ulimit -c") == "100\n100\n0\n"
    finally:
        box.stop()


# ends -------------------------------------------------------------------------------------------------------------------------------


def test_stop_leaves_nothing(native: Driver) -> None:
    before = native.remains()
    box = native.create()
    box.connection.out("(sleep 100 > /dev/null 2>&1 &); for i in 1 2 3; do sh -c 'sleep 100' > /dev/null 2>&1 & done")
    box.stop()
    until(lambda: not alive(box.pid) and not alive(box.init))
    assert native.remains() == before


def test_the_death_of_aether_is_the_death_of_all_inside_and_reap_cleans_up(native: Driver) -> None:
    before = native.remains()
    box = native.create()
    marker = "sleep 98765"
    box.connection.out(f"{marker} > /dev/null 2>&1 &")
    assert processes(marker)
    os.kill(box.pid, signal.SIGKILL)
    until(lambda: not alive(box.init) and not processes(marker), 5)
    native.reap(box.id)
    assert native.remains() == before
    native.reap(box.id)  # again: nothing to do is no error


def processes(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == text:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_supervisor_killed_while_it_builds_is_cleaned_up_by_reap(native: Driver) -> None:
    assert native.process is not None
    before = native.remains()
    for delay in range(24):
        name = unused_id()
        native.send(wire.F_CREATE, native.spec(name))
        time.sleep(delay * 0.0003)
        children = Path(f"/proc/{native.process.pid}/task/{native.process.pid}/children").read_text().split()
        for child in children:  # the aether that is at work, if it came to life yet
            os.kill(int(child), signal.SIGKILL)
        if not children:
            native.receive()
        for child in children:
            until(partial(dead, int(child)))
        native.sock.settimeout(0.05)
        try:
            while native.receive().type != wire.F_READY:  # it may have been ready before it died
                pass
        except (TimeoutError, Refused):
            pass
        native.sock.settimeout(60)
        native.reap(name)
        assert native.remains() == before
    assert len(processes_of(native)) == 1  # the launcher


def processes_of(native: Driver) -> list[int]:
    """Host processes that run our binary with this driver's arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if native.cgroup.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_without_a_user_namespace(native: Driver) -> None:
    box = native.create(userns=0)
    try:
        assert box.connection.out("id -u; cat /proc/self/uid_map").split() == ["0", "0", "0", "4294967295"]
        assert box.connection.run(shell="mount -t tmpfs x /tmp")[0] != 0
        assert box.connection.run(shell="cat /proc/kallsyms | grep -q .")[0] != 0
    finally:
        box.stop()


def test_reap_ends_a_supervisor_that_lives(native: Driver) -> None:
    before = native.remains()
    box = native.create()
    native.reap(box.id)
    assert not alive(box.pid) and not alive(box.init)
    assert native.remains() == before


def test_sandboxes_outlive_the_launcher_and_a_new_one_joins_their_mounts() -> None:
    with driver() as d:
        first = d.create()
        first.connection.out("echo kept > /kept")
        d.close()
        assert first.connection.out("cat /kept") == "kept\n"
        d.start(join=first.pid)
        d.mount_medium()  # there already
        second = d.create()  # and so is the layer
        assert second.connection.out("echo ok") == "ok\n"
        assert os.readlink(f"/proc/{first.pid}/ns/mnt") == os.readlink(f"/proc/{second.pid}/ns/mnt")
        second.stop()
        first.stop()


def test_a_create_without_a_listener_is_undone() -> None:
    with driver() as d:
        for _ in range(5):
            d.send(wire.F_CREATE, d.spec(unused_id()))
            d.sock.close()
            assert d.process is not None
            d.process.kill()
            d.process.wait()
            until(lambda: not d.remains())
            d.start()
            d.mount_medium()
            d.mount_layer("base", d.home / "base.erofs")


def test_join_refuses_a_process_that_is_none_of_ours(native: Driver, tmp_path: Path) -> None:
    other = Driver(tmp_path)
    other.start(join=os.getpid())
    with pytest.raises(Refused, match="not an aether"):
        other.receive()
    assert other.process is not None and other.process.wait(5) == 1
    other.remove_groups()


def test_a_malformed_request_ends_nothing(native: Driver, box: Sandbox) -> None:
    with pytest.raises(Refused) as error:
        native.call(wire.F_CREATE, wire.u64(999, 1))
    assert error.value.code == "wire_field"
    with pytest.raises(Refused) as error:
        native.call(wire.F_CREATE, b"\1\2\3")
    assert error.value.code == "wire_field"
    with pytest.raises(Refused):
        native.call(200)
    assert box.connection.out("echo ok") == "ok\n"


def test_medium_is_not_mounted_twice(native: Driver) -> None:
    other = Driver(native.home, medium_mb=native.medium_mb)
    other.cgroup = native.cgroup + "b"
    other.start()
    other.sock.settimeout(20)
    with pytest.raises(Refused, match="in use"):
        other.mount_medium()
    other.close()
    other.remove_groups()


def test_terminal_belongs_to_the_user(box: Sandbox) -> None:
    payload = wire.text(wire.T_COMMAND, unused_id()) + wire.u64(wire.T_EXEC_FLAGS, wire.X_STREAM | wire.X_PTY) + wire.u64(wire.T_ROWS, 31)
    payload += wire.u64(wire.T_COLS, 97) + wire.text(wire.T_USER, "app")
    payload += wire.text(wire.T_SHELL, "ls -l /dev/pts/0; cat /proc/self/stat | head -c 1 > /dev/tty; busybox stty size; echo $TERM")
    frame, output = box.connection.call(wire.F_EXEC, payload), b""
    while frame.type != wire.F_END:
        frame = box.connection.receive()
        if frame.type == wire.F_DATA:
            output += wire.data(frame.payload)[1]
    assert b" app " in output and b"31 97" in output and b"xterm" in output, output


def test_disk_usage(native: Driver) -> None:
    fields = Fields(native.call(wire.F_DISK_USAGE).payload)
    assert fields.u64(wire.T_SIZE) > 900 << 20 and fields.u64(wire.T_BYTES) > 500 << 20


def test_many_creates_in_flight(native: Driver) -> None:
    before = native.remains()
    ids = [unused_id() for _ in range(24)]
    for index, name in enumerate(ids):
        native.send(wire.F_CREATE, native.spec(name, uid_base=UID_BASE + 65536 * index))
    for _ in ids:
        assert native.receive().type == wire.F_READY
    for name in ids:
        connection = Connection(native.run / name / "aether.sock")
        assert connection.out("echo ok") == "ok\n"
        connection.call(wire.F_STOP)
        connection.close()
    until(lambda: native.remains() == before)


def test_the_control_socket_needs_whole_frames(native: Driver, tmp_path: Path) -> None:
    other = Driver(tmp_path)
    other.start()
    other.sock.send(b"short")
    assert other.process is not None and other.process.wait(5) == 1
    with pytest.raises((ConnectionError, wire.WireError, socket.timeout)):
        other.receive()
    other.remove_groups()
    (other.run / "loader.sock").unlink(missing_ok=True)  # a launcher that follows would take its place
