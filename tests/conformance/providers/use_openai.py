"""OpenAI Agents SDK: sessions, the workspace, terminals, and an agent's run with a scripted model."""
from __future__ import annotations

import asyncio
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from agents import ModelResponse, Runner, Usage
from agents.models.interface import Model
from agents.run import RunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import Dir, File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    PtySessionNotFoundError,
    WorkspaceReadNotFoundError,
)
from cases import PROBE, araises, case, main, prove, running
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from dsec.faces.openai_agents import DsecSandboxClient, DsecSandboxClientOptions

FILES = Manifest(entries={"src": Dir(children={"f.py": File(content=b"def f(x):\n    return x - 1\n")}), "note.txt": File(content=b"of the manifest\n")})


@case("a session: commands, users, files")
async def session() -> None:
    client = DsecSandboxClient()
    made = await client.create(manifest=FILES, options=DsecSandboxClientOptions(env={"A": "b"}, memory_mb=512))
    id = made.state.sandbox_id
    try:
        async with made:
            assert await made.running()
            prove((await made.exec(PROBE)).stdout.decode(), id)
            got = await made.exec("echo $A; pwd; cat note.txt; echo err >&2; exit 3")
            assert (got.stdout, got.stderr, got.exit_code) == (b"b\n/workspace\nof the manifest\n", b"err\n", 3)
            assert (await made.exec("id", "-un", shell=False, user="nobody")).stdout == b"nobody\n"
            assert (await made.exec("id -un", user="no-such-user")).exit_code == 126
            assert (await made.exec("no-such-program", shell=False)).exit_code == 127
            await araises(ExecTimeoutError, made.exec("sleep 60", timeout=0.5))
            await made.write(Path("a/b.bin"), io.BytesIO(bytes(range(256)) * 1000))
            assert (await made.read(Path("a/b.bin"))).read() == bytes(range(256)) * 1000
            assert [Path(entry.path).name for entry in await made.ls("a")] == ["b.bin"]
            await araises(WorkspaceReadNotFoundError, made.read(Path("none")))
            await made.exec("ln -s /etc out")
            await araises(InvalidManifestPathError, made.read(Path("out/passwd")))  # a link that leads out of the workspace
        assert id in running()  # a session's end keeps it, for a resume
    finally:
        await client.delete(made)
        await client.close()
    assert id not in running()


@case("taken up again: the same sandbox, or a new one with the snapshot's files")
async def resumed() -> None:
    with tempfile.TemporaryDirectory() as home:
        await _resumed(Path(home))


async def _resumed(home: Path) -> None:
    client = DsecSandboxClient()
    made = await client.create(manifest=FILES, snapshot=LocalSnapshotSpec(base_path=home), options=DsecSandboxClientOptions())
    await made.start()
    await made.write(Path("kept.txt"), io.BytesIO(b"kept\n"))
    first = made.state.sandbox_id
    await made.stop()  # writes the snapshot; no delete: the process dies, so to say
    state = json.loads(json.dumps(client.serialize_session_state(made.state)))
    await client.close()
    client = DsecSandboxClient()
    again = await client.resume(client.deserialize_session_state(dict(state)))
    async with again:
        assert again.state.sandbox_id == first and (await again.exec("cat kept.txt note.txt")).stdout == b"kept\nof the manifest\n"
    await client.delete(again)
    assert first not in running()
    other = await client.resume(client.deserialize_session_state(dict(state)))
    async with other:
        assert other.state.sandbox_id != first and other.state.sandbox_id in running()
        assert (await other.exec("cat kept.txt src/f.py")).stdout.startswith(b"kept\ndef f(x)")
    await client.delete(other)
    assert other.state.sandbox_id not in running()
    await client.close()


@case("commands that go on, on a terminal or not")
async def terminals() -> None:
    client = DsecSandboxClient()
    made = await client.create(options=DsecSandboxClientOptions())
    try:
        async with made:
            assert made.supports_pty()
            done = await made.pty_exec_start("echo quick; exit 5", yield_time_s=30)
            assert done.process_id is None and done.exit_code == 5 and done.output == b"quick\n"
            going = await made.pty_exec_start("echo begun; sleep 2; echo ended", yield_time_s=0.5)
            assert going.process_id is not None and going.exit_code is None and going.output == b"begun\n", going
            rest = await made.pty_write_stdin(session_id=going.process_id, chars="", yield_time_s=30)
            assert rest.exit_code == 0 and rest.output == b"ended\n", rest
            shell = await made.pty_exec_start("python3", "-q", shell=False, tty=True, yield_time_s=1)
            assert shell.process_id is not None
            answer = await made.pty_write_stdin(session_id=shell.process_id, chars="print(6*7)\n", yield_time_s=2)
            assert b"42" in answer.output
            await made.pty_terminate_all()
            await araises(PtySessionNotFoundError, made.pty_write_stdin(session_id=shell.process_id, chars="x"))
            assert (await made.exec("pgrep python3 || echo none")).stdout == b"none\n"
    finally:
        await client.delete(made)
        await client.close()


@case("ports")
async def ports() -> None:
    client = DsecSandboxClient()
    made = await client.create(manifest=FILES, options=DsecSandboxClientOptions(exposed_ports=(8000,)))
    try:
        async with made:
            await made.pty_exec_start("python3", "-m", "http.server", "8000", shell=False, yield_time_s=0.5)
            end = await made.resolve_exposed_port(8000)
            assert (end.host, end.tls) == ("127.0.0.1", False)
            for _ in range(200):
                try:
                    reader, writer = await asyncio.open_connection(end.host, end.port)
                    writer.write(b"GET /note.txt HTTP/1.0\r\n\r\n")
                    got = await reader.read()
                    writer.close()
                    if got:
                        break
                except OSError:
                    pass
                await asyncio.sleep(0.05)
            assert got.endswith(b"of the manifest\n"), got
            await araises(ExposedPortUnavailableError, made.resolve_exposed_port(9000))
        try:
            await asyncio.open_connection(end.host, end.port)
        except OSError:
            return
        raise AssertionError("a port of a session that has ended is open")
    finally:
        await client.delete(made)
        await client.close()


class Scripted(Model):
    """A model that has made up its mind: commands, then a word."""

    def __init__(self, *commands: str) -> None:
        self.commands = list(commands)
        self.seen: list[Any] = []

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:
        self.seen.append(input[-1])
        if self.commands:
            arguments = json.dumps({"cmd": self.commands.pop(0), "yield_time_ms": 30000})
            output: Any = ResponseFunctionToolCall(type="function_call", call_id=f"c{len(self.seen)}", name="exec_command", arguments=arguments)
        else:
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            output = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@case("an agent's run")
async def agent() -> None:
    client = DsecSandboxClient()
    model = Scripted(PROBE, "sed -i 's/x - 1/x + 1/' src/f.py && cd src && python3 -c 'import f; print(f.f(41))'")
    worker = SandboxAgent(name="worker", instructions="repair f", model=model, default_manifest=FILES)
    config = RunConfig(sandbox=SandboxRunConfig(client=client, options=DsecSandboxClientOptions()), tracing_disabled=True)
    ids: set[str] = set()
    made = client._make

    async def noted(*args: Any) -> Any:
        box = await made(*args)
        ids.add(box.id)
        return box

    client._make = noted  # type: ignore[method-assign]
    result = await Runner.run(worker, "go", run_config=config)
    assert result.final_output == "done" and "42" in str(model.seen[2]), model.seen
    assert len(ids) == 1 and str(model.seen[1]).count("pid:[") == 1
    assert "absent" in str(model.seen[1])
    assert not ids & set(running()), "a run's sandbox ends with it"
    await client.close()


@case("its own E2B client, on the E2B face")
async def e2b() -> None:
    from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType

    client = E2BSandboxClient()
    options = E2BSandboxClientOptions(E2BSandboxType.E2B, template="base", timeout=120, envs={"A": "b"}, allow_internet_access=False)
    made = await client.create(manifest=FILES, options=options)
    try:
        async with made:
            id = made.state.sandbox_id
            prove((await made.exec(PROBE)).stdout.decode(), id)
            got = await made.exec("echo $A; pwd; cat note.txt; echo err >&2; exit 3")
            assert (got.stdout, got.stderr, got.exit_code) == (b"b\n/workspace\nof the manifest\n", b"err\n", 3), got
            await made.write(Path("a/b.bin"), io.BytesIO(bytes(range(256)) * 100))
            assert (await made.read(Path("a/b.bin"))).read() == bytes(range(256)) * 100
            await araises(WorkspaceReadNotFoundError, made.read(Path("none")))
            await araises(ExecTimeoutError, made.exec("sleep 60", timeout=1))
            going = await made.pty_exec_start("python3", "-q", shell=False, tty=True, yield_time_s=1)
            answer = await made.pty_write_stdin(session_id=going.process_id, chars="print(6*7)\n", yield_time_s=2)
            assert b"42" in answer.output
            await made.pty_terminate_all()
    finally:
        await client.delete(made)
    assert id not in running()


main("openai-agents", "e2b")
