"""Where the client finds its node and its key, and its synchronous form."""
from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.api_fake import KEY, Api, api

import libdsec
from dsec.config import DEFAULT_LISTEN
from libdsec import DSecClient, DSecContainerRunArgs, SyncDSecClient, errors, sync
from libdsec.api import query
from libdsec.portal import Portal
from libdsec.wire import DEFAULT_URL, Ending, ExecResult

ROOT = Path(__file__).resolve().parents[2]
ARGS = DSecContainerRunArgs(container_image="base", memory_limit_mb=16, init_user=None)


def key_of(client: DSecClient) -> str | None:
    head = client._api.transport._head.decode()
    return head.partition("Bearer ")[2].strip() or None


def test_where_the_key_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DSEC_STATE", str(tmp_path / "none"))
    assert key_of(DSecClient()) is None and DSecClient().base_url == DEFAULT_URL == f"http://{DEFAULT_LISTEN}"
    (tmp_path / "config" / "dsec").mkdir(parents=True)
    (tmp_path / "config" / "dsec" / "key").write_text("from-config\n")
    assert key_of(DSecClient()) == "from-config"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "api.key").write_text("from-state\n")
    monkeypatch.setenv("DSEC_STATE", str(tmp_path / "state"))
    assert key_of(DSecClient()) == "from-state"
    assert key_of(DSecClient("https://elsewhere.example")) == "from-config", "a node's own key goes to that node only"
    monkeypatch.setenv("DSEC_API_KEY", "from-environment")
    monkeypatch.setenv("DSEC_URL", "https://box.example:8443/base")
    client = DSecClient()
    assert key_of(client) == "from-environment" and client._api.transport.prefix == "/base"
    assert key_of(DSecClient(api_key="given")) == "given"
    with pytest.raises(errors.InvalidRequest, match="unencrypted"):
        DSecClient("http://elsewhere.example")
    DSecClient("http://elsewhere.example", allow_http=True)


def test_queries() -> None:
    assert query({"a": None, "b": False, "c": True, "d": 0, "e": "x y&z=/", "f": ["1", "2"]}) == "?c=1&d=0&e=x%20y%26z%3D/&f=1&f=2"
    assert query({}) == ""


def test_the_import_is_light() -> None:
    code = "import sys, libdsec; print([m for m in ('dsec', 'httpx', 'tarfile', 'ssl', 'libdsec.sync', 'uvicorn') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "dsec'" not in loaded.replace("libdsec", "") and "httpx" not in loaded and "sync" not in loaded and "uvicorn" not in loaded


def test_both_surfaces_are_equal() -> None:
    subprocess.run([sys.executable, str(ROOT / "libdsec" / "tools" / "make_sync.py"), "--check"], check=True)
    for name in ("DSecClient", "Sandbox", "Session", "Command", "CommandStream", "Files"):
        one, other = getattr(libdsec, name), getattr(sync, name)
        mine = {n: f for n, f in inspect.getmembers(one, inspect.isfunction) if not n.startswith("_")}
        theirs = {n: f for n, f in inspect.getmembers(other, inspect.isfunction) if not n.startswith("_")}
        assert {"close" if n == "aclose" else n for n in mine} == set(theirs)
        for method, function in mine.items():
            twin = theirs["close" if method == "aclose" else method]
            assert list(inspect.signature(function).parameters) == list(inspect.signature(twin).parameters)
            assert function.__doc__ == twin.__doc__


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Api]:
    """A server on a loop in a thread."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Api] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with api(tmp_path) as made:
            found.append(made)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.mark.parametrize("call", ["pause_all", "resume_all", "hibernate_all", "stop_all", "list"])
async def test_labels_are_a_mapping(call: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="must be a mapping"):
        await getattr(DSecClient("http://127.0.0.1:1", KEY), call)("job=42")


async def ended(sandbox: str, command: str, timeout: float | None = None) -> ExecResult:
    return ExecResult(id=command, sandbox=sandbox, ending=Ending.EXITED, exit_code=0)


def test_the_synchronous_client(served: Api) -> None:
    threads = threading.active_count()
    with SyncDSecClient(served.url, KEY) as client:
        with client.run_container(ARGS) as box:
            assert isinstance(box, libdsec.SyncSandbox) and isinstance(box, sync.Sandbox)
            result = box.exec(["echo", "hello"])
            assert result.ok and result.text == "hello" and box.id == box.info.id
            kinds = [event.kind for event in box.stream(["echo", "x"])]
            assert kinds == ["stdout", "exit"]
            served.edge.wait = ended  # type: ignore[method-assign]
            nested: list[str] = []
            box.exec(["echo", "x"], on_stdout=lambda text: nested.append(text + box.exec(["echo", "y"]).text))
            assert nested == ["xy"], "a callback may use the client"
            command = box.start(["echo", "z"])
            assert isinstance(command, sync.Command) and command.id == box.command(command.id).id
        assert [info.id for info in client.list(state="ended")] == [box.id]
        made = client.run_many(ARGS, 2)
        assert all(isinstance(item, sync.Sandbox) for item in made) and len(client.stop_all(everything=True)) == 2
        with pytest.raises(errors.SandboxNotFound):
            client.connect("a" * 20)
    client.close()
    assert threading.active_count() <= threads
    with pytest.raises(errors.ConnectionFailed), SyncDSecClient("http://127.0.0.1:1", KEY):
        pass
    assert threading.active_count() <= threads, "a client that could not open leaves no thread"


def test_the_portal_refuses_to_wait_for_itself() -> None:
    portal = Portal()

    async def inner() -> None:
        async def nothing() -> None:
            return None

        portal.run(nothing())

    with pytest.raises(RuntimeError, match="own thread"):
        portal.run(inner())
    portal.close()
    portal.close()
