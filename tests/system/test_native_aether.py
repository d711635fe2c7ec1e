"""aether after READY, in real sandboxes over its own socket: endings and their causes, logs, streams, sessions, lease, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.native_driver import Connection, Driver, Refused, Sandbox, driver, unused_id

from dsec.edge import wire
from dsec.edge.wire import Fields, Frame, Record

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def node() -> Iterator[Driver]:
    with driver() as d:
        yield d


@pytest.fixture
def box(node: Driver) -> Iterator[Sandbox]:
    sandbox = node.create()
    yield sandbox
    with contextlib.suppress(OSError):
        sandbox.stop()


class Result:
    """An END frame."""

    def __init__(self, frame: Frame) -> None:
        assert frame.type == wire.F_END, frame
        fields = Fields(frame.payload)
        self.record: Record = wire.record(fields.bytes(wire.T_RECORD) or b"")
        self.out = fields.bytes(wire.T_STDOUT) or self.record.stdout
        self.err = fields.bytes(wire.T_STDERR) or self.record.stderr


def request(shell: str | None = None, *argv: str, command: str | None = None, flags: int = 0, timeout: float = 0, session: str = "",
            stdin: bytes | None = None) -> bytes:  # fmt: skip
    payload = wire.text(wire.T_COMMAND, command or unused_id()) + wire.u64(wire.T_EXEC_FLAGS, flags)
    payload += wire.text(wire.T_SHELL, shell) if shell is not None else b"".join(wire.text(wire.T_ARG, a) for a in argv)
    payload += wire.u64(wire.T_TIMEOUT_NS, int(timeout * 1e9)) if timeout else b""
    payload += wire.text(wire.T_SESSION, session) if session else b""
    payload += wire.raw(wire.T_BYTES, stdin) if stdin is not None else b""
    return payload


def run(c: Connection, shell: str, **kw: object) -> Result:
    return Result(c.call(wire.F_EXEC, request(shell, flags=wire.X_COLLECT, **kw)))  # type: ignore[arg-type]


def connect(box: Sandbox) -> Connection:
    return Connection(box.driver.run / box.id / "aether.sock")


def about(c: Connection, kind: int, command: str, extra: bytes = b"") -> Frame:
    return c.call(kind, wire.text(wire.T_COMMAND, command) + extra)


def refused(c: Connection, kind: int, payload: bytes) -> str:
    with pytest.raises(Refused) as caught:
        c.call(kind, payload)
    return caught.value.code


def inside(box: Sandbox) -> set[int]:
    """Host pids of every process of the sandbox."""
    pids: set[int] = set()
    for group in (g for root in ("", "*/") for g in Path("/sys/fs/cgroup").glob(f"{root}{box.driver.cgroup}/{box.id}")):
        for procs in group.rglob("cgroup.procs"):
            pids.update(int(p) for p in procs.read_text().split())
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# endings ---------------------------------------------------------------------------------------------------------------------------


def test_exit_code_and_signal_death_are_told_apart(box: Sandbox) -> None:
    c = box.connection
    assert run(c, "exit 137").record.code == 137
    killed = run(c, "kill -9 $$").record
    assert (killed.ending, killed.signal, killed.code) == (wire.END_SIGNALED, signal.SIGKILL, -1)
    assert run(c, "kill -TERM $$").record.signal == signal.SIGTERM
    assert run(c, "exit 124").record.ending == wire.END_EXITED
    r = run(c, "echo out; echo err >&2")
    assert (r.out, r.err) == (b"out\n", b"err\n")


def test_timeout_reaches_the_whole_tree(box: Sandbox) -> None:
    before = inside(box)
    started = time.monotonic()
    r = run(box.connection, "trap '' TERM INT HUP; (sleep 300 &) ; sleep 300 & setsid sleep 300 & sleep 300", timeout=0.5).record
    assert r.ending == wire.END_TIMEOUT and 0.4 < time.monotonic() - started < 1.5
    time.sleep(0.3)
    assert inside(box) == before


def test_a_background_helper_does_not_keep_the_command_open(box: Sandbox) -> None:
    started = time.monotonic()
    r = run(box.connection, "sleep 300 & echo done")
    assert r.out == b"done\n" and r.record.code == 0 and r.record.flags & wire.R_PIPES_LEFT
    assert time.monotonic() - started < 1


def test_what_comes_later_goes_to_the_log(box: Sandbox) -> None:
    run(box.connection, "(sleep 0.4; seq() { i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; }; seq) & echo now", command="late")
    time.sleep(1)
    frame = about(box.connection, wire.F_LOG_READ, "late", wire.u64(wire.T_STREAM, wire.STREAM_OUT) + wire.u64(wire.T_LENGTH, 100_000))
    assert wire.data(frame.payload)[1] == b"now\n" + b"".join(b"%d\n" % i for i in range(3000))


def test_oom_is_an_ending_with_limit_and_peak_and_the_sandbox_lives(box: Sandbox) -> None:
    r = run(box.connection, "exec dd if=/dev/zero of=/dev/null bs=600M count=1", timeout=30).record
    assert (r.ending, r.memory_limit) == (wire.END_OOM, 256 << 20)
    assert r.memory_peak > 200 << 20 and r.limits & wire.LIMIT_MEMORY
    survivor = run(box.connection, "dd if=/dev/zero of=/dev/null bs=600M count=1; exit 5", timeout=30).record
    assert (survivor.ending, survivor.code) == (wire.END_EXITED, 5) and survivor.limits & wire.LIMIT_MEMORY
    after = run(box.connection, "kill -9 $$").record
    assert after.ending in (wire.END_SIGNALED, wire.END_OOM)  # within a second of the kill it may be taken for one
    time.sleep(1.1)
    assert run(box.connection, "kill -9 $$").record.ending == wire.END_SIGNALED
    assert run(box.connection, "echo ok").out == b"ok\n"


def test_disk_full_is_in_the_limits_and_ends_only_on_request(box: Sandbox) -> None:
    r = run(box.connection, "dd if=/dev/zero of=/srv/fill bs=1M count=200; exit 1", timeout=30).record
    assert (r.ending, r.code) == (wire.END_EXITED, 1) and r.limits & wire.LIMIT_DISK
    assert r.ending != wire.END_OOM and not r.limits & wire.LIMIT_MEMORY
    run(box.connection, "dd if=/dev/null of=/srv/fill bs=1")
    time.sleep(0.2)
    stopped = Result(box.connection.call(wire.F_EXEC, request(
        "dd if=/dev/zero of=/srv/fill bs=1M count=200; sleep 60", flags=wire.X_COLLECT | wire.X_STOP_AT_DISK, timeout=30)))  # fmt: skip
    assert stopped.record.ending == wire.END_DISK_FULL


def test_process_limit_is_in_the_limits(box: Sandbox) -> None:
    r = run(box.connection, "i=0; while [ $i -lt 100 ]; do sleep 1 & i=$((i+1)); done; wait", timeout=30).record
    assert r.limits & wire.LIMIT_PIDS
    time.sleep(1.2)
    assert run(box.connection, "echo ok").out == b"ok\n"


def test_output_limit_keeps_head_and_tail_and_counts(box: Sandbox) -> None:
    r = run(box.connection, "i=0; while [ $i -lt 30000 ]; do echo $i 12345; i=$((i+1)); done")
    whole = b"".join(b"%d 12345\n" % i for i in range(30000))
    assert r.record.out_total == len(whole) and r.record.out_dropped == len(whole) - 131072 and r.record.limits & wire.LIMIT_OUTPUT
    assert r.out == whole[:65536] + whole[-65536:]
    flood = request("while :; do echo yyyyyyyyyyyy; done", flags=wire.X_COLLECT | wire.X_STOP_AT_OUTPUT)
    assert Result(box.connection.call(wire.F_EXEC, flood)).record.ending == wire.END_OUTPUT_LIMIT


# logs, streams, stdin ----------------------------------------------------------------------------------------------------------------


def follow(c: Connection, first: Frame | None = None) -> tuple[bytes, int, Result]:
    """Output until END, offsets verified; (bytes, gaps, end)."""
    got, at, gaps = b"", 0, 0
    frame = first or c.receive()
    while frame.type != wire.F_END:
        if frame.type == wire.F_GAP:
            at = Fields(frame.payload).u64(wire.T_TO)
            gaps += 1
        elif frame.type == wire.F_DATA:
            offset, chunk = wire.data(frame.payload)
            assert offset == at, (offset, at)
            at += len(chunk)
            got += chunk
        frame = c.receive()
    return got, gaps, Result(frame)


def test_a_stream_is_lossless_for_a_slow_reader_and_reattach_replays(box: Sandbox) -> None:
    c = connect(box)
    payload = request("dd if=/dev/zero bs=64k count=200 2>/dev/null", command="big", flags=wire.X_STREAM)
    assert c.call(wire.F_EXEC, payload).type == wire.F_STARTED
    time.sleep(0.5)
    got, gaps, end = follow(c)
    assert len(got) == 200 * 65536 and not gaps and end.record.out_dropped == len(got) - 131072
    got, gaps, end = follow(c, about(c, wire.F_ATTACH, "big"))
    assert len(got) == 131072 and gaps == 1 and end.record.code == 0
    c.close()


def test_detached_command_is_read_later_once_each(box: Sandbox) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.05; done; exit 7"
    c = connect(box)
    assert c.call(wire.F_EXEC, request(script, command="lines", flags=wire.X_STREAM)).type == wire.F_STARTED
    c.receive()
    c.close()
    c = connect(box)
    got, gaps, end = follow(c, about(c, wire.F_ATTACH, "lines"))
    assert got == b"".join(b"%d\n" % i for i in range(1, 10)) and not gaps and end.record.code == 7
    again = Result(c.call(wire.F_EXEC, request(script, command="lines", flags=wire.X_COLLECT)))
    assert again.out == got and again.record.start_ns == end.record.start_ns
    assert refused(c, wire.F_EXEC, request("echo other", command="lines", flags=wire.X_COLLECT)) == "command_exists"
    c.close()


def test_exit_is_never_visible_before_the_output(box: Sandbox) -> None:
    c = box.connection
    for i in range(100):
        payload = request("i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); done", command=f"vis-{i}")
        assert c.call(wire.F_EXEC, payload).type == wire.F_STARTED
        while True:
            c.sock.sendall(wire.frame(wire.F_LIST, 9))
            ended = False
            while (frame := c.receive()).type == wire.F_RECORD:
                record = wire.record(Fields(frame.payload).bytes(wire.T_RECORD) or b"")
                ended |= record.command == f"vis-{i}" and record.ending != wire.END_RUNNING
            if ended:
                break
        frame = about(c, wire.F_LOG_READ, f"vis-{i}", wire.u64(wire.T_STREAM, 1) + wire.u64(wire.T_LENGTH, 10_000))
        assert wire.data(frame.payload)[1].count(b"\n") == 200


def test_stdin(box: Sandbox) -> None:
    c = connect(box)
    every = bytes(range(256)) * 1024
    assert run(c, "md5sum || cat >/dev/null", stdin=every).record.ending == wire.END_EXITED
    r = run(c, "cat", stdin=every[:4000])
    assert r.out == every[:4000]
    assert run(c, "cat; echo eof").out == b"eof\n"
    c.call(wire.F_EXEC, request("wc -c", command="count", flags=wire.X_STDIN))
    chunk = os.urandom(1 << 18)
    for _ in range(200):
        assert about(c, wire.F_STDIN, "count", wire.raw(wire.T_BYTES, chunk)).type == wire.F_OK
    assert about(c, wire.F_STDIN_CLOSE, "count").type == wire.F_OK
    assert Result(about(c, wire.F_WAIT, "count")).out == b"52428800\n"
    c.close()


def test_pty(box: Sandbox) -> None:
    c = connect(box)
    c.call(wire.F_EXEC, request("tty; read x; echo got $x", command="pty", flags=wire.X_PTY))
    about(c, wire.F_STDIN, "pty", wire.raw(wire.T_BYTES, b"hey\n"))
    out = Result(about(c, wire.F_WAIT, "pty")).out
    assert b"got hey" in out
    c.close()


# sessions ----------------------------------------------------------------------------------------------------------------------------


def test_session(box: Sandbox) -> None:
    c = box.connection
    c.call(wire.F_SESSION_OPEN, wire.text(wire.T_NAME, "s") + wire.text(wire.T_CWD, "/srv") + wire.text(wire.T_ENV, "FOO=bar"))
    assert run(c, "echo $FOO $PWD; x=7; cd /tmp", session="s").out == b"bar /srv\n"
    assert run(c, "echo $x $PWD", session="s").out == b"7 /tmp\n"
    for broken in ("echo 'open", 'echo "open', "if true; then echo", "cat <<EOF\nnever", "for i in"):
        assert run(c, broken, session="s", timeout=3).record.ending == wire.END_EXITED
        assert run(c, "echo next", session="s", timeout=3).out == b"next\n"
    r = run(c, "sleep 100", session="s", timeout=0.3).record
    assert r.ending == wire.END_TIMEOUT and not r.flags & wire.R_SESSION_LOST
    assert run(c, "echo $x", session="s").out == b"7\n"
    r = run(c, "while :; do :; done", session="s", timeout=0.3).record
    assert r.ending == wire.END_TIMEOUT and r.flags & wire.R_SESSION_LOST
    assert run(c, "echo [$x] $FOO", session="s").out == b"[] bar\n"
    gone = run(c, "echo bye; exit 3", session="s")
    assert gone.out == b"bye\n" and gone.record.code == 3
    assert refused(c, wire.F_EXEC, request("echo x", session="s", flags=wire.X_COLLECT)) == "session_not_found"
    assert refused(c, wire.F_SESSION_CLOSE, wire.text(wire.T_NAME, "s")) == "session_not_found"


def test_one_busy_session_blocks_nobody_else(box: Sandbox) -> None:
    one, two = connect(box), box.connection
    for name in ("s1", "s2"):
        two.call(wire.F_SESSION_OPEN, wire.text(wire.T_NAME, name))
    one.sock.sendall(wire.frame(wire.F_EXEC, 1, request("sleep 1000", session="s1", timeout=1, flags=wire.X_COLLECT)))
    time.sleep(0.1)
    started = time.monotonic()
    assert run(two, "echo ok", session="s2").out == b"ok\n" and run(two, "echo ok").out == b"ok\n"
    assert time.monotonic() - started < 0.5
    assert run(two, "echo queued", session="s1", timeout=1).out == b"queued\n"
    assert Result(one.receive()).record.ending == wire.END_TIMEOUT
    one.close()


# the sandbox's own end -----------------------------------------------------------------------------------------------------------------


def test_stop_ends_commands_as_killed_and_leaves_records(node: Driver) -> None:
    box = node.create()
    c = connect(box)
    c.sock.sendall(wire.frame(wire.F_EXEC, 5, request("echo started; sleep 100", command="running", flags=wire.X_COLLECT)))
    while b"started" not in about(box.connection, wire.F_LOG_READ, "running", wire.u64(wire.T_STREAM, wire.STREAM_OUT)).payload:
        time.sleep(0.01)
    box.stop()
    r = Result(c.receive())
    assert r.record.ending == wire.END_KILLED and r.out == b"started\n"
    assert c.receive().type == wire.F_ENDED
    state = node.state / "sandboxes" / box.id
    assert json.loads((state / "end.json").read_text())["cause"] == "stopped"
    assert b"running" in (state / "commands.bin").read_bytes()
    until = time.monotonic() + 2
    while alive(box.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(box.pid)


def test_idle_and_deadline(node: Driver) -> None:
    idle = node.create(idle_ns=600_000_000)
    started = time.monotonic()
    run(idle.connection, "sleep 1")
    idle.connection.call(wire.F_SUBSCRIBE)
    frame = idle.connection.receive()
    assert frame.type == wire.F_ENDED and Fields(frame.payload).text(wire.T_CAUSE) == "expired"
    assert 1.5 < time.monotonic() - started < 3
    dead = node.create()
    dead.connection.call(wire.F_LEASE, wire.u64(wire.T_DEADLINE_NS, time.time_ns() + 400_000_000))
    dead.connection.sock.sendall(wire.frame(wire.F_EXEC, 7, request("sleep 100", flags=wire.X_COLLECT)))
    assert Result(dead.connection.receive()).record.ending == wire.END_KILLED
    assert Fields(dead.connection.receive().payload).text(wire.T_CAUSE) == "expired"


def test_death_of_pid_1_is_an_end_with_a_cause(node: Driver) -> None:
    box = node.create()
    box.connection.sock.sendall(wire.frame(wire.F_EXEC, 7, request("sleep 100", flags=wire.X_COLLECT)))
    time.sleep(0.2)
    os.kill(box.init, signal.SIGKILL)
    assert Result(box.connection.receive()).record.ending == wire.END_LOST
    assert Fields(box.connection.receive().payload).text(wire.T_CAUSE) == "agent_crash"


def test_death_of_aether_leaves_nothing_running(node: Driver) -> None:
    box = node.create()
    box.connection.call(wire.F_EXEC, request("sleep 100 | cat"))
    until = time.monotonic() + 5
    while len(inside(box)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(box.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while inside(box) and time.monotonic() < until:
        time.sleep(0.02)
    assert not inside(box)
    node.reap(box.id)


def test_replaced_shell_is_named(box: Sandbox) -> None:
    c = box.connection
    c.call(wire.F_SUBSCRIBE)
    c.sock.sendall(wire.frame(wire.F_EXEC, 50, request("rm /bin/sh; echo no shell > /bin/sh", flags=wire.X_COLLECT)))
    frames = [c.receive(), c.receive()]
    assert any(f.type == wire.F_EVENT and Fields(f.payload).text(wire.T_EVENT) == "health" for f in frames)
    assert any(f.type == wire.F_END and Result(f).record.flags & wire.R_SHELL_REPLACED for f in frames)


def test_many_at_once(node: Driver) -> None:
    box = node.create(pids=600)
    c = box.connection
    for i in range(250):
        c.sock.sendall(wire.frame(wire.F_EXEC, 1000 + i, request(None, "echo", str(i), command=f"m-{i}", flags=wire.X_COLLECT)))
    seen = {Result(c.receive()).out for _ in range(250)}
    assert seen == {b"%d\n" % i for i in range(250)}
    box.stop()


def test_measure(node: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    """No bar here (bench/exec has them): prints what the socket itself costs."""
    box = node.create()
    c = connect(box)
    times = []
    for _ in range(300):
        started = time.perf_counter()
        c.call(wire.F_EXEC, request(None, "true", flags=wire.X_COLLECT))
        times.append(time.perf_counter() - started)
    times.sort()
    c.sock.sendall(wire.frame(wire.F_EXEC, 1, request("exec dd if=/dev/zero bs=1M count=1024 2>/dev/null", flags=wire.X_STREAM)))
    buffer, total, started = bytearray(1 << 20), 0, time.perf_counter()
    while total < 1 << 30:
        total += c.sock.recv_into(buffer)
    rate = total / (time.perf_counter() - started) / 1e9
    with capsys.disabled():
        print(f"\n  no-op exec over the socket: p50 {times[150] * 1e3:.2f} ms, p99 {times[297] * 1e3:.2f} ms; stream {rate:.2f} GB/s")
    c.close()
    box.stop()


def test_one_that_was_made_ahead_gets_its_names_once(node: Driver) -> None:
    box = node.create(hostname="ahead", env=["A=1", "OLD=1"])
    fresh = node.create(hostname="given", env=["A=2", "NEW=x y"])
    lease = wire.text(wire.T_HOSTNAME, "given") + wire.text(wire.T_ENV, "A=2") + wire.text(wire.T_ENV, "NEW=x y")
    for payload, code in ((wire.text(wire.T_HOSTNAME, "no way"), "invalid_request"), (wire.text(wire.T_ENV, "A=2"), "invalid_request")):
        with pytest.raises(Refused) as refused:
            box.connection.call(wire.F_LEASE, payload)
        assert refused.value.code == code
    host = os.uname().nodename
    for _ in range(2):  # an edge that died over it says it again
        assert box.connection.call(wire.F_LEASE, lease).type == wire.F_OK
    assert os.uname().nodename == host
    looks = "hostname; cat /etc/hostname /etc/hosts; stat -c '%a %u %g %s' /etc/hostname /etc/hosts; env; id; ls -A / /etc"
    outputs = [run(each.connection, looks).out for each in (box, fresh)]
    assert outputs[0] == outputs[1] and b"ahead" not in outputs[0] and b"OLD" not in outputs[0] and b"NEW=x y" in outputs[0]
    with pytest.raises(Refused, match="was used"):
        box.connection.call(wire.F_LEASE, lease)
    box.connection.call(wire.F_LEASE, wire.u64(wire.T_IDLE_NS, 10**12))
    box.stop()
    fresh.stop()
