"""What a client can do, one function a feature: `python features.py` (probing.py says how, reaching.py has more of them)."""
from __future__ import annotations

import asyncio
import gzip
import inspect
import io
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from typing import Any

from probing import RUN, VERSION, Absent, Refused, feature, main, need, raises, takes

import e2b
from e2b import (
    AsyncSandbox,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

# sandboxes ----------------------------------------------------------------------------------------------------------------------


@feature("create, info")
def create(s: Sandbox) -> None:
    info = s.get_info()
    assert info.sandbox_id == s.sandbox_id and info.template_id == "base" and info.metadata["kind"] == "main" and info.state == SandboxState.RUNNING
    assert 100 < (info.end_at - info.started_at).total_seconds() <= 121 and info.cpu_count >= 1 and info.memory_mb > 0
    assert info.allow_internet_access is False


@feature("default timeout of 300 s")
def default_timeout(s: Sandbox) -> None:
    with Sandbox.create() as other:
        info = other.get_info()
        assert abs((info.end_at - info.started_at).total_seconds() - 300) < 2
        again = Sandbox.connect(other.sandbox_id)
        assert again.get_info().end_at >= info.end_at


@feature("list by metadata and state")
def listing(s: Sandbox) -> None:
    odd = {"job": "a&b=c d", "ü/?": "100%", "run": RUN}
    with Sandbox.create(metadata=odd, timeout=60) as other:
        def ids(**query: Any) -> list[str]:
            return [one.sandbox_id for one in Sandbox.list(query=SandboxQuery(**query)).next_items()]

        assert ids(metadata=odd) == [other.sandbox_id] and ids(metadata={**odd, "job": "x"}) == []
        assert ids(metadata=odd, state=[SandboxState.RUNNING, SandboxState.PAUSED]) == [other.sandbox_id]
        assert ids(metadata=odd, state=[SandboxState.PAUSED]) == []


@feature("list in pages")
def pages(s: Sandbox) -> None:
    made = [Sandbox.create(metadata={"page": RUN}, timeout=60) for _ in range(3)]
    try:
        found, paginator = [], Sandbox.list(query=SandboxQuery(metadata={"page": RUN}), limit=2)
        while paginator.has_next:
            page = paginator.next_items()
            assert len(page) <= 2
            found += [one.sandbox_id for one in page]
        assert sorted(found) == sorted(one.sandbox_id for one in made)
    finally:
        for one in made:
            one.kill()


@feature("timeout")
def set_timeout(s: Sandbox) -> None:
    s.set_timeout(120)
    other = Sandbox.create(timeout=1)
    end = time.monotonic() + 10
    while other.is_running():
        assert time.monotonic() < end
        time.sleep(0.1)
    raises(TimeoutException, lambda: other.commands.run("true"))
    raises(NotFoundException, lambda: Sandbox.connect(other.sandbox_id))
    assert other.kill() is False


@feature("pause, connect")
def pause(s: Sandbox) -> None:
    other = Sandbox.create(timeout=60)
    pausing = other.pause if hasattr(other, "pause") else other.beta_pause
    handle = other.commands.run("echo kept > /tmp/kept; sleep 50", background=True)
    while not other.files.exists("/tmp/kept"):
        time.sleep(0.01)
    assert pausing() in (True, None)
    assert pausing() in (False, None)  # 409
    assert other.get_info().state == SandboxState.PAUSED and other.is_running() is False
    raises(TimeoutException, lambda: other.commands.run("true"))
    raises(TimeoutException, handle.wait)  # its stream has ended, the process has not
    again = Sandbox.connect(other.sandbox_id, timeout=90)
    assert again.files.read("/tmp/kept") == "kept\n" and handle.pid in [one.pid for one in again.commands.list()]
    info = again.get_info()
    assert info.state == SandboxState.RUNNING and info.end_at.timestamp() > time.time() + 80
    assert other.kill() is True and other.kill() is False


@feature("pause at the timeout")
def pauses_at_timeout(s: Sandbox) -> None:
    takes(Sandbox.create, "lifecycle")
    other = Sandbox.create(timeout=1, lifecycle={"on_timeout": "pause"})
    end = time.monotonic() + 10
    while other.get_info().state != SandboxState.PAUSED:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert Sandbox.connect(other.sandbox_id, timeout=60).commands.run("echo on").stdout == "on\n"
    other.kill()


@feature("resume when used")
def auto_resume(s: Sandbox) -> None:
    takes(Sandbox.create, "lifecycle")
    if VERSION < (2, 31):
        raise Absent
    other = Sandbox.create(timeout=30, lifecycle={"on_timeout": "pause", "auto_resume": True})
    other.pause()
    assert other.commands.run("echo up").stdout == "up\n" and other.get_info().state == SandboxState.RUNNING
    other.kill()


@feature("kill")
def kill(s: Sandbox) -> None:
    other = Sandbox.create(timeout=60)
    handle = other.commands.run("sleep 100", background=True)
    assert other.kill() is True and other.kill() is False and Sandbox.kill(other.sandbox_id) is False
    raises(TimeoutException, lambda: other.commands.run("true"))
    raises(TimeoutException, lambda: other.files.read("/etc/hostname"))
    raises(Exception, handle.wait)
    raises(NotFoundException, other.get_info)


@feature("metrics")
def metrics(s: Sandbox) -> None:
    s.commands.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    found = s.get_metrics()
    assert len(found) == 1 and found[0].mem_used > 0 and found[0].mem_total >= found[0].mem_used and found[0].disk_total > 0 and found[0].cpu_used_pct > 0


@feature("snapshot")
def snapshot(s: Sandbox) -> None:
    need(Sandbox, "create_snapshot")
    s.files.write("/srv/kept.txt", "as it was")
    taken = s.create_snapshot()
    try:
        s.files.write("/srv/kept.txt", "changed")
        with Sandbox.create(taken.snapshot_id, timeout=60) as other:
            assert other.files.read("/srv/kept.txt") == "as it was"
        listed = Sandbox.list_snapshots(sandbox_id=s.sandbox_id).next_items()
        assert [one.snapshot_id for one in listed] == [taken.snapshot_id]
    finally:
        assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    assert Sandbox.delete_snapshot(taken.snapshot_id) is False


@feature("fork")
def fork(s: Sandbox) -> None:
    need(s, "fork")
    s.files.write("/srv/forked.txt", "of the parent")
    children = s.fork(count=2)
    assert len({child.sandbox_id for child in children} | {s.sandbox_id}) == 3
    for child in children:
        assert child.files.read("/srv/forked.txt") == "of the parent" and child.get_info().metadata["kind"] == "main"
        child.kill()


@feature("network: none, and it says so")
def network(s: Sandbox) -> None:
    with Sandbox.create(timeout=60, allow_internet_access=False) as other:
        assert other.get_info().allow_internet_access is False
    raises(SandboxException, lambda: Sandbox.create(timeout=60, network={"allow_out": ["10.0.0.0/8"], "deny_out": ["0.0.0.0/0"]}), "400")
    need(s, "update_network")
    s.update_network({"deny_out": ["0.0.0.0/0"]})
    raises(SandboxException, lambda: s.update_network({"allow_out": ["10.0.0.1"], "deny_out": ["0.0.0.0/0"]}), "400")


@feature("template that is not there")
def no_template(s: Sandbox) -> None:
    raises(SandboxException, lambda: Sandbox.create("no-such-template"), "404")


@feature("template build: COPY, RUN, ENV, WORKDIR, USER")
def template_build(s: Sandbox) -> None:
    need(e2b, "Template")
    with tempfile.TemporaryDirectory() as context:
        os.makedirs(f"{context}/tree/below")
        for name, text in (("one.txt", f"one of {RUN}"), ("tree/two.txt", "two"), ("tree/below/three.sh", "echo three")):
            with open(f"{context}/{name}", "w") as file:
                file.write(text)
        template = (
            e2b.Template(file_context_path=context).from_template("base").copy("one.txt", "/srv/").copy("tree", "/srv/tree", mode=0o755)
            .set_envs({"MADE": 'by "steps" $HOME'}).set_workdir("/srv").run_cmd("cat one.txt > copied; id -un > who").run_cmd("id -un > /tmp/who", user="nobody")
        )
        heard: list[str] = []
        name = f"made-{RUN}"
        named = {"name": name} if "name" in inspect.signature(e2b.Template.build).parameters else {"alias": name}
        e2b.Template.build(template, **named, cpu_count=1, memory_mb=512, on_build_logs=lambda entry: heard.append(entry.message))
        assert any("ready" in line for line in heard)
        with Sandbox.create(name, timeout=60) as made:
            ran = made.commands.run("pwd; cat copied who /tmp/who tree/two.txt; sh tree/below/three.sh; stat -c %a tree/two.txt; echo $MADE")
            assert ran.stdout == f'/srv\none of {RUN}root\nnobody\ntwothree\n755\nby "steps" $HOME\n', ran.stdout
            assert made.get_info().memory_mb == 512
        failing = e2b.Template().from_template("base").run_cmd("echo it broke; exit 5")
        raises(e2b.exceptions.BuildException, lambda: e2b.Template.build(failing, **named))
        raises(e2b.exceptions.BuildException, lambda: e2b.Template.build(e2b.Template().from_template("base").set_start_cmd("sleep 1", "true"), **named), "not supported")


# commands -----------------------------------------------------------------------------------------------------------------------


@feature("run: streams, exit code, signal")
def run(s: Sandbox) -> None:
    out, err = [], []
    result = s.commands.run("echo one; echo two >&2; sleep 0.1; printf three", on_stdout=out.append, on_stderr=err.append)
    assert (result.stdout, result.stderr, result.exit_code) == ("one\nthree", "two\n", 0) and not result.error
    assert "".join(out) == "one\nthree" and "".join(err) == "two\n" and len(out) == 2
    error = raises(CommandExitException, lambda: s.commands.run("echo bad >&2; exit 3"))
    assert (error.exit_code, error.stderr, error.error) == (3, "bad\n", "exit status 3")
    error = raises(CommandExitException, lambda: s.commands.run("kill -9 $$"))
    assert (error.exit_code, error.error) == (-1, "signal: killed")


@feature("run: cwd, env, user")
def run_with(s: Sandbox) -> None:
    assert s.commands.run("pwd; echo $A$B", cwd="/usr/lib", envs={"A": "x"}).stdout == "/usr/lib\nxfrom-create\n"
    assert s.commands.run("id -un; echo $HOME", user="nobody", cwd="/").stdout == "nobody\n/nonexistent\n"
    assert s.commands.run("pwd").stdout == "/root\n"
    raises(Exception, lambda: s.commands.run("true", cwd="/no/such"), "/no/such")
    raises(Exception, lambda: s.commands.run("true", user="not-there"))


@feature("run: split characters, much output")
def characters(s: Sandbox) -> None:
    text = "añ€😀" * 40000
    s.files.write("/tmp/text", text)
    assert s.commands.run("cat /tmp/text; cat /tmp/text >&2").stdout == text
    assert s.commands.run("printf '\\342\\202'; sleep 0.2; printf '\\254\\n'").stdout == "€\n"
    assert len(s.commands.run("head -c 4000000 /dev/zero | tr '\\0' x").stdout) == 4000000


@feature("background, stdin")
def background(s: Sandbox) -> None:
    takes(s.commands.run, "stdin")
    handle = s.commands.run("read a; echo got $a; cat", background=True, stdin=True)
    assert handle.pid in [one.pid for one in s.commands.list()]
    s.commands.send_stdin(handle.pid, "first\n")
    s.commands.send_stdin(handle.pid, "second ✓\n")
    if hasattr(s.commands, "close_stdin"):
        s.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "got first\nsecond ✓\n"
    else:
        assert s.commands.kill(handle.pid) is True
    assert s.commands.run("cat; echo $?").stdout == "0\n"  # no input is the end of it


@feature("close stdin")
def close_stdin(s: Sandbox) -> None:
    need(s.commands, "close_stdin")
    handle = s.commands.run("wc -c", background=True, stdin=True)
    s.commands.send_stdin(handle.pid, "x" * 100000)
    s.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "100000\n"


@feature("stream input")
def stream_input(s: Sandbox) -> None:
    sandbox = inspect.getmembers(s.commands, callable)
    name = next((name for name, _ in sandbox if name.startswith("stream_")), None)
    if name is None:
        raise Absent
    handle = s.commands.run("wc -c", background=True, stdin=True)
    call = getattr(s.commands, name)
    call(handle.pid, iter(["abc", "de"]))
    s.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "5\n"


@feature("list, connect, kill of processes")
def processes(s: Sandbox) -> None:
    handle = s.commands.run("echo early; sleep 0.3; echo late; exec sleep 100", background=True, envs={"K": "v"})
    listed = {one.pid: one for one in s.commands.list()}[handle.pid]
    assert listed.cmd == "/bin/bash" and listed.args[:2] == ["-l", "-c"] and listed.envs == {"K": "v"} and listed.cwd == "/root"
    time.sleep(0.1)
    other = s.commands.connect(handle.pid)
    assert other.pid == handle.pid
    seen: list[str] = []
    waiter = threading.Thread(target=lambda: raises(CommandExitException, lambda: other.wait(on_stdout=seen.append)))
    waiter.start()
    time.sleep(0.5)
    assert s.commands.kill(handle.pid) is True and s.commands.kill(handle.pid) is False
    waiter.join(10)
    assert not waiter.is_alive() and "".join(seen) == "late\n"
    assert raises(CommandExitException, handle.wait).exit_code == -1
    assert s.commands.kill(999999) is False
    raises(NotFoundException, lambda: s.commands.connect(999999))


@feature("process survives its client")
def survives(s: Sandbox) -> None:
    handle = s.commands.run("sleep 1; echo done > /tmp/survived; sleep 50", background=True)
    handle.disconnect()
    time.sleep(0.2)
    assert handle.pid in [one.pid for one in s.commands.list()]
    end = time.monotonic() + 10
    while not s.files.exists("/tmp/survived"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert s.commands.kill(handle.pid) is True


@feature("deadline of a command")
def deadline(s: Sandbox) -> None:
    began = time.monotonic()
    raises(TimeoutException, lambda: s.commands.run("sleep 3 & sleep 3; touch /tmp/late", timeout=0.5))
    assert time.monotonic() - began < 2
    assert "sleep" not in s.commands.run("for f in /proc/[0-9]*/comm; do cat $f; done").stdout


@feature("deadline of a command, async")
def deadline_async(s: Sandbox) -> None:
    async def work() -> None:
        sandbox = await AsyncSandbox.create(timeout=60)
        began = time.monotonic()
        try:
            await sandbox.commands.run("sleep 3; echo late", timeout=0.5)
        except TimeoutException:
            assert time.monotonic() - began < 2
        else:
            raise AssertionError("success was reported")
        finally:
            await sandbox.kill()

    asyncio.run(work())


@feature("40 async commands at once")
def parallel(s: Sandbox) -> None:
    async def work() -> None:
        sandbox = await AsyncSandbox.create(timeout=60)
        results = await asyncio.gather(*(sandbox.commands.run(f"sleep 0.1; echo {n}") for n in range(40)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]
        assert await sandbox.kill() is True

    asyncio.run(work())


@feature("terminal")
def terminal(s: Sandbox) -> None:
    from e2b import PtySize

    seen: list[bytes] = []
    handle = s.pty.create(PtySize(rows=30, cols=100), envs={"FROM": "pty"}, cwd="/usr")
    s.pty.send_stdin(handle.pid, b"stty size; echo $FROM-$TERM; pwd\n")
    time.sleep(0.3)
    s.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    s.pty.send_stdin(handle.pid, b"stty size; exit 7\n")
    error = raises(CommandExitException, lambda: handle.wait(on_pty=lambda data: seen.append(bytes(data))))
    text = b"".join(seen).decode()
    assert error.exit_code == 7 and "30 100" in text and "40 120" in text and "pty-xterm-256color" in text and "/usr\r\n" in text
    handle = s.pty.create(PtySize(rows=30, cols=100))
    assert s.pty.kill(handle.pid) is True and s.pty.kill(handle.pid) is False


# files --------------------------------------------------------------------------------------------------------------------------


@feature("files: text, bytes, stream")
def files(s: Sandbox) -> None:
    written = s.files.write("made/for/it.txt", "hällo\n")
    home = s.commands.run("printf $HOME").stdout
    assert written.path == f"{home}/made/for/it.txt" and written.name == "it.txt"
    assert s.files.read("made/for/it.txt") == "hällo\n" == s.files.read("~/made/for/it.txt") == s.commands.run("cat made/for/it.txt").stdout
    data = bytes(range(256)) * 5000
    s.files.write("/tmp/bytes", data)
    assert bytes(s.files.read("/tmp/bytes", format="bytes")) == data
    assert b"".join(s.files.read("/tmp/bytes", format="stream")) == data
    s.files.write("/tmp/io", io.BytesIO(data))
    assert bytes(s.files.read("/tmp/io", format="bytes")) == data
    s.files.write("/tmp/empty", "")
    assert s.files.read("/tmp/empty") == ""
    raises(NotFoundException, lambda: s.files.read("/no/such"))
    raises(Exception, lambda: s.files.read("/etc"), "directory")
    raises(Exception, lambda: s.files.write("/etc", "x"))
    raises(Exception, lambda: s.files.read("~other/x"))


@feature("files: several at once")
def several(s: Sandbox) -> None:
    written = s.files.write_files([{"path": f"/tmp/many/{n}", "data": f"content {n}"} for n in range(5)])
    assert [one.path for one in written] == [f"/tmp/many/{n}" for n in range(5)]
    assert s.files.read("/tmp/many/3") == "content 3"


@feature("files: octet stream, gzip")
def octets(s: Sandbox) -> None:
    takes(s.files.write, "use_octet_stream", "gzip")
    data = os.urandom(100000) + bytes(3000000)
    s.files.write("/tmp/octets", data, use_octet_stream=True)
    assert bytes(s.files.read("/tmp/octets", format="bytes")) == data
    s.files.write("/tmp/packed", data, gzip=True)
    assert bytes(s.files.read("/tmp/packed", format="bytes")) == data == bytes(s.files.read("/tmp/packed", format="bytes", gzip=True))


@feature("files: as another user")
def as_user(s: Sandbox) -> None:
    s.files.write("/tmp/of-nobody", "x", user="nobody")
    assert s.files.get_info("/tmp/of-nobody").owner == "nobody"
    s.commands.run("touch /tmp/secret; chmod 600 /tmp/secret")
    raises(Exception, lambda: s.files.read("/tmp/secret", user="nobody"))
    raises(Exception, lambda: s.files.read("/tmp/of-nobody", user="not-there"))


@feature("directories: list, make, rename, remove, info")
def directories(s: Sandbox) -> None:
    assert s.files.make_dir("/tmp/d/e/f") is True and s.files.make_dir("/tmp/d/e/f") is False
    s.files.write("/tmp/d/a.txt", "12345")
    s.commands.run("ln -s a.txt /tmp/d/link; ln -s nowhere /tmp/d/broken; chmod 640 /tmp/d/a.txt")
    found = {one.name: one for one in s.files.list("/tmp/d")}
    found.pop("broken", None)  # old clients do not know the type of a link that leads nowhere, and leave it out
    assert list(found) == ["a.txt", "e", "link"], found
    assert found["a.txt"].size == 5 and found["a.txt"].permissions == "-rw-r-----", found["a.txt"]
    assert found["e"].type.value == "dir" and found["a.txt"].type.value == "file" and found["link"].symlink_target
    assert [one.path for one in s.files.list("/tmp/d", depth=3)][-2:] == ["/tmp/d/e/f", "/tmp/d/link"]
    renamed = s.files.rename("/tmp/d/a.txt", "/tmp/d/new/b.txt")
    assert renamed.path == "/tmp/d/new/b.txt" and s.files.exists("/tmp/d/new/b.txt") and not s.files.exists("/tmp/d/a.txt")
    info = s.files.get_info("/tmp/d/new/b.txt")
    assert (info.size, info.mode, info.owner) == (5, 0o640, "root") and abs(info.modified_time.timestamp() - time.time()) < 100000
    s.files.remove("/tmp/d")
    s.files.remove("/tmp/d")
    assert not s.files.exists("/tmp/d")
    raises(NotFoundException, lambda: s.files.list("/tmp/d"))
    raises(NotFoundException, lambda: s.files.get_info("/tmp/d"))
    raises(NotFoundException, lambda: s.files.rename("/tmp/d", "/tmp/e"))
    raises(Exception, lambda: s.files.list("/etc/passwd"))


@feature("signed URLs")
def signed(s: Sandbox) -> None:
    s.files.write("/tmp/signed", "by url")
    assert urllib.request.urlopen(s.download_url("/tmp/signed"), timeout=10).read() == b"by url"
    assert urllib.request.urlopen(s.download_url("/tmp/signed", use_signature_expiration=60), timeout=10).read() == b"by url"
    expired = raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(s.download_url("/tmp/signed", use_signature_expiration=-60), timeout=10))
    wrong = raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(s.download_url("/tmp/signed").replace("signed", "other"), timeout=10))
    assert expired.code == wrong.code == 401
    request = urllib.request.Request(
        s.upload_url("/tmp/up"), data=gzip.compress(b"uploaded"), method="POST",
        headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
    )
    assert json.load(urllib.request.urlopen(request, timeout=10)) == [{"name": "up", "path": "/tmp/up", "type": "file"}]
    assert s.files.read("/tmp/up") == "uploaded"


@feature("file metadata")
def file_metadata(s: Sandbox) -> None:
    takes(s.files.write, "metadata")
    raises(Exception, lambda: s.files.write("/tmp/x", "x", metadata={"a": "b"}))  # the client knows from envdVersion
    raise Refused


import reaching  # noqa: E402, F401 - its features come after these

if __name__ == "__main__":
    sys.exit(main(lambda: Sandbox.create(timeout=120, metadata={"kind": "main"}, envs={"B": "from-create"})))
