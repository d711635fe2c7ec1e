"""The MCP server by the official client, over both transports: `dsec mcp`, as a user starts it."""
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from cases import PROBE, case, main, prove, running
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

DSEC = [sys.executable, "-c", "from dsec.cli import main; main()", "mcp"]
TOOLS = {
    "create_sandbox", "list_sandboxes", "stop_sandbox", "run_command", "start_command", "read_output", "send_input", "kill_command", "read_file",
    "write_file", "list_files", "remove_file", "snapshot_sandbox", "fork_sandbox", "remove_snapshot",
}  # fmt: skip


class Tools:
    """A client's tools: fields of a result, or the error."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.text = ""

    async def __call__(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(tool, arguments)
        self.text = "".join(part.text for part in result.content)
        assert not result.is_error, self.text
        assert result.structured_content is not None
        return result.structured_content

    async def error(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(tool, arguments)
        self.text = "".join(part.text for part in result.content)
        assert result.is_error, self.text
        return (result.structured_content or {}).get("error", {})


@contextlib.asynccontextmanager
async def stdio(*options: str, mode: str = "auto") -> AsyncIterator[Tools]:
    """A client with a server of its own."""
    server = StdioServerParameters(command=DSEC[0], args=[*DSEC[1:], *options], env=dict(os.environ))
    async with Client(stdio_client(server), mode=mode) as client:
        yield Tools(client)


@contextlib.asynccontextmanager
async def served(*options: str) -> AsyncIterator[tuple[str, str, subprocess.Popen[str]]]:
    """A server over HTTP: its URL and token."""
    process = subprocess.Popen([*DSEC, "--http", "127.0.0.1:0", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, token = process.stdout.readline().split()[2], process.stdout.readline().strip().removeprefix("MCP_TOKEN=")
        yield url, token, process
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close() if process.stdout else None


@contextlib.asynccontextmanager
async def over_http(url: str, token: str, mode: str) -> AsyncIterator[Tools]:
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as http, Client(streamable_http_client(url, http_client=http), mode=mode) as client:
        yield Tools(client)


async def gone(id: str) -> None:
    """It may take the server a moment to see that its client went."""
    for _ in range(200):
        if id not in running():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{id} still runs")


@case("stdio: tools, a sandbox's life, what a client leaves")
async def life() -> None:
    async with stdio("--image", "bookworm", "--image", "busybox", "--sandboxes", "3") as call:
        listed = {tool.name: tool for tool in (await call.client.list_tools()).tools}
        assert set(listed) == TOOLS
        for tool in listed.values():
            assert tool.description and tool.output_schema and tool.annotations is not None
        assert (await call("list_sandboxes"))["images"] == ["bookworm", "busybox"]
        box = await call("create_sandbox", name="mine", env={"A": "b"})
        id = box["sandbox"]
        assert box["image"] == "bookworm" and box["state"] == "running" and id in call.text
        prove((await call("run_command", sandbox=id, command=PROBE))["stdout"]["text"], id)
        got = await call("run_command", sandbox=id, command="echo $A; pwd; cat; echo no >&2; exit 3", cwd="/tmp", stdin="in\n")
        assert got["stdout"]["text"] == "b\n/tmp\nin\n" and got["stderr"]["text"] == "no\n" and (got["ending"], got["exit_code"]) == ("exited", 3)
        assert call.text == "[exit code 3]\nb\n/tmp\nin\n\n[stderr]\nno\n"
        other = await call("create_sandbox", image="busybox")
        assert (await call("run_command", sandbox=other["sandbox"], command="id -un"))["stdout"]["text"] == "root\n"
        assert {one["sandbox"] for one in (await call("list_sandboxes"))["sandboxes"]} == {id, other["sandbox"]}
        await call("stop_sandbox", sandbox=other["sandbox"])
        assert other["sandbox"] not in running()
    await gone(id)
    async with stdio("--keep", mode="legacy") as call:  # the other revisions of the protocol
        id = (await call("create_sandbox"))["sandbox"]
    try:
        assert id in running()
        async with stdio() as call:
            assert (await call.error("run_command", sandbox=id, command="true"))["code"] == "sandbox_not_found"  # somebody else's
    finally:
        subprocess.run([os.environ["DSEC_TEST_CLI"], "stop", id], check=True, capture_output=True)


@case("bounds: head and tail, counts, reading on")
async def bounds() -> None:
    async with stdio() as call:
        id = (await call("create_sandbox"))["sandbox"]
        got = await call("run_command", sandbox=id, command="seq 1 200000; echo ☕ >&2", max_bytes=1000)
        out = got["stdout"]
        begin, end = out["omitted"]
        assert out["total_bytes"] == 1288895 and len(out["text"]) < 1200 and out["text"].startswith("1\n2\n") and out["text"].endswith("\n200000\n")
        assert f"[... {end - begin} bytes are not shown here: offsets {begin} to {end} ...]" in out["text"] and got["stderr"]["text"] == "☕\n"
        assert len(call.text) < 1500 and got["command"] in call.text
        whole = "".join(f"{n}\n" for n in range(1, 200001))
        part = await call("read_output", sandbox=id, command=got["command"], offset=begin, max_bytes=5000)
        assert part["text"] == whole[begin : begin + 5000] and part["next_offset"] == begin + 5000 and part["ending"] == "exited"
        flood = await call("run_command", sandbox=id, command="head -c 20000000 /dev/zero | tr '\\0' A")
        assert flood["stdout"]["total_bytes"] == 20000000 and len(call.text) < 13000 and flood["limits_hit"] == ["output"]
        begin = flood["stdout"]["omitted"][0]
        part = await call("read_output", sandbox=id, command=flood["command"], offset=5_000_000, max_bytes=100)
        assert part["offset"] > 5_000_000 and part["text"] == "A" * 100  # what the log has dropped is skipped
        cup = "☕" * 3000
        await call("write_file", sandbox=id, path="/tmp/a/cups", content=cup, mode="600")
        read, offset = "", 0
        while offset is not None:
            part = await call("read_file", sandbox=id, path="/tmp/a/cups", offset=offset, max_bytes=1000)
            read, offset = read + part["content"], part["next_offset"]
        assert read == cup and part["size"] == 9000
        await call("run_command", sandbox=id, command="mkdir /tmp/many; cd /tmp/many; touch $(seq 1 300)")
        many = await call("list_files", sandbox=id, path="/tmp/many", max_entries=10)
        assert many["total_entries"] == 300 and many["truncated"] and len(many["entries"]) == 10 and "290 of 300" in call.text


@case("commands in the background, sessions, cancellation, typed errors")
async def commands() -> None:
    async with stdio("--sandboxes", "2") as call:
        id = (await call("create_sandbox"))["sandbox"]
        await call("run_command", sandbox=id, command="cd /usr; x=5", session="s")
        assert (await call("run_command", sandbox=id, command="pwd; echo $x", session="s"))["stdout"]["text"] == "/usr\n5\n"
        late = await call("run_command", sandbox=id, command="echo begun; sleep 60", timeout=1)
        assert late["ending"] == "timeout" and late["exit_code"] is None and late["stdout"]["text"] == "begun\n" and "timeout" in call.text
        started = await call("start_command", sandbox=id, command="while read line; do echo got $line; done; exit 4", takes_input=True)
        await call("send_input", sandbox=id, command=started["command"], text="one\n")
        for _ in range(100):
            seen = await call("read_output", sandbox=id, command=started["command"])
            if seen["text"]:
                break
            await asyncio.sleep(0.05)
        assert seen["text"] == "got one\n" and seen["ending"] == "running" and seen["next_offset"] == 8
        await call("send_input", sandbox=id, command=started["command"], text="two\n", close=True)
        seen = await call("read_output", sandbox=id, command=started["command"], offset=8, wait=30)
        assert seen["text"] == "got two\n" and (seen["ending"], seen["exit_code"]) == ("exited", 4)
        started = await call("start_command", sandbox=id, command="sleep 600")
        await call("kill_command", sandbox=id, command=started["command"])
        assert (await call("read_output", sandbox=id, command=started["command"], wait=30))["ending"] == "killed"
        # a call that its client gives up: the command does not go on
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await call("run_command", sandbox=id, command="echo $$ > /tmp/pid; sleep 1000")
        alive = "kill -0 $(cat /tmp/pid) && echo alive || echo dead"
        for _ in range(100):
            if (await call("run_command", sandbox=id, command=alive))["stdout"]["text"] == "dead\n":
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("a cancelled command goes on")
        assert (await call.error("run_command", sandbox="z" * 20, command="true"))["code"] == "sandbox_not_found"
        assert (await call.error("read_file", sandbox=id, path="/none"))["code"] == "file_not_found" and call.text.startswith("file_not_found: ")
        assert (await call.error("run_command", sandbox=id, command="true", cwd="/none"))["code"] == "cwd_not_found"
        assert (await call.error("create_sandbox", image="none"))["code"] == "layer_not_found"
        assert (await call.error("write_file", sandbox=id, path="/x", content="%%", encoding="base64"))["code"] == "invalid_request"
        await call.error("run_command", sandbox=id, command="true", timeout=-1)
        assert "timeout" in call.text
        await call("create_sandbox")
        full = await call.error("create_sandbox")
        assert full["code"] == "resource_exhausted" and "at most 2" in full["message"]


@case("files, snapshots, forks")
async def copies() -> None:
    async with stdio() as call:
        id = (await call("create_sandbox"))["sandbox"]
        await call("write_file", sandbox=id, path="/srv/b", content="AAEC/w==", encoding="base64")
        assert (await call("read_file", sandbox=id, path="/srv/b", encoding="base64"))["content"] == "AAEC/w=="
        taken = (await call("snapshot_sandbox", sandbox=id, name="before"))["snapshot"]
        await call("remove_file", sandbox=id, path="/srv/b")
        children = (await call("fork_sandbox", sandbox=id, count=2))["sandboxes"]
        assert len(children) == 2
        assert (await call("list_files", sandbox=children[0]["sandbox"], path="/srv"))["total_entries"] == 0
        again = (await call("create_sandbox", snapshot=taken))["sandbox"]
        assert (await call("list_files", sandbox=again, path="/srv"))["entries"][0]["path"] == "/srv/b"
        shown = await call("list_sandboxes")
        assert len(shown["sandboxes"]) == 4 and shown["snapshots"] == {taken: "before"}
        async with stdio() as other:
            assert (await other.error("create_sandbox", snapshot=taken))["code"] == "snapshot_not_found"
            assert (await other.error("remove_snapshot", snapshot=taken))["code"] == "snapshot_not_found"
    await gone(again)
    left = subprocess.run([os.environ["DSEC_TEST_CLI"], "snapshot", "ls", "--json"], capture_output=True, text=True, check=True).stdout
    assert taken not in left


@case("HTTP: a token, sessions that own what they make, the stateless revision")
async def http() -> None:
    async with served() as (url, token, _):
        for wrong in ({}, {"authorization": "Bearer mcp_wrong"}):
            async with httpx2.AsyncClient(headers=wrong) as plain:
                assert (await plain.post(url, json={})).status_code == 401
        async with over_http(url, token, "legacy") as one, over_http(url, token, "legacy") as two:
            mine = (await one("create_sandbox"))["sandbox"]
            prove((await one("run_command", sandbox=mine, command=PROBE))["stdout"]["text"], mine)
            assert (await two.error("run_command", sandbox=mine, command="true"))["code"] == "sandbox_not_found"
            assert (await two("list_sandboxes"))["sandboxes"] == []
            theirs = (await two("create_sandbox"))["sandbox"]
            many = await asyncio.gather(*(one.client.call_tool("run_command", {"sandbox": mine, "command": f"echo {n}"}) for n in range(20)))
            assert [result.structured_content["stdout"]["text"] for result in many] == [f"{n}\n" for n in range(20)]
        await gone(mine)  # with its session
        await gone(theirs)
        async with over_http(url, token, "auto") as modern:
            assert modern.client.protocol_version >= "2026-07-28"
            shared = (await modern("create_sandbox"))["sandbox"]
        async with over_http(url, token, "auto") as modern:
            assert [one["sandbox"] for one in (await modern("list_sandboxes"))["sandboxes"]] == [shared]
    assert shared not in running()  # with the server


@case("a server that is ended by a signal leaves nothing; without a node it says so")
async def ends() -> None:
    server = subprocess.Popen(DSEC, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None

    def call(id: int, method: str, **params: Any) -> str:
        import json

        server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}) + "\n")
        server.stdin.flush()
        return server.stdout.readline()

    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    assert '"dsec"' in call(1, "initialize", **hello)
    server.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
    made = call(2, "tools/call", name="create_sandbox", arguments={})
    ids = [id for id in running() if id in made]
    assert len(ids) == 1, made
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 128 + signal.SIGTERM and ids[0] not in running()
    server.stdin.close()
    server.stdout.close()
    env = {**os.environ, "DSEC_URL": "http://127.0.0.1:1"}
    done = subprocess.run(DSEC, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 125 and "connection_failed" in done.stderr, done
    done = subprocess.run([*DSEC, "--http", "0.0.0.0:1"], capture_output=True, text=True)
    assert done.returncode == 2 and "loopback" in done.stderr


if __name__ == "__main__":
    main("mcp")
