"""What all tests share.

Fixtures (session-wide unless said otherwise):
    node            the real node of the run (tests.harness.Node): `.url`, `.key`, `.pid`, `.client_env()`; started when first asked for
    client          per test: an opened libdsec.DSecClient of that node
    sync_client     per test: the same, libdsec.SyncDSecClient
    python_image    name of a Debian environment with python3, git and procps;  git_image is the same
    busybox_image   name of the smallest one (a static busybox)
    app_image       name of an environment with ENV, USER app and WORKDIR /srv of its own
    supervisor_pid  function(sandbox id) -> host pid of its supervisor
    internet        a small internet in a namespace of its own (tests.internet.Internet), which sandboxes reach by their network rules
    tcp_proxy       per test: `await tcp_proxy.client()`, `tcp_proxy.cut()`: a loopback relay whose links the test can break
A test that kills or reconfigures a node starts its own: `tests.harness.start_node(directory)`, `.destroy()` at the end.

Markers: `@pytest.mark.root` (root and a real kernel), `@pytest.mark.slow` (only in `make test-full`). A test that uses `node` is root.
What this machine cannot do is skipped by name with the reason; what it can do is never skipped: `needs("capability")` asks the doctor.

The whole run is one leak check (tests/leaks.py): what is on the host before and after must be the same, or the run fails and lists it.
"""
from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.leaks import Leaks

if TYPE_CHECKING:
    from libdsec import DSecClient, SyncDSecClient
    from tests.harness import Node
    from tests.internet import Internet

ROOT = Path(__file__).resolve().parents[1]
_leaks = pytest.StashKey[Leaks]()
_found = pytest.StashKey[list[str]]()


# the run ------------------------------------------------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        session.config.stash[_leaks] = Leaks(factory.getbasetemp())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full, root = os.environ.get("DSEC_TEST_FULL") == "1", os.geteuid() == 0
    for item in items:
        if not root and (item.get_closest_marker("root") or {"node", "own_node"} & set(getattr(item, "fixturenames", ()))):
            item.add_marker(pytest.mark.skip(reason="root: needs root (this user is not)"))
        if not full and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs in make test-full"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.config.stash[_leaks].learn()  # before a node that the test started is destroyed


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    leaks = session.config.stash.get(_leaks, None)
    if leaks is not None:
        session.config.stash[_found] = left = leaks.wait()
        if left and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash.get(_found, None)
    if left:
        terminalreporter.section("left behind on this host", sep="=", red=True)
        for line in left:
            terminalreporter.line(line)
    if left is not None:
        skipped = len(terminalreporter.stats.get("skipped", []))
        terminalreporter.line(f"leaks: {len(left)} (mounts, cgroups, processes, namespaces, loop devices, network, files); skipped: {skipped}")


# nodes and clients --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def needs() -> Callable[[str], None]:
    """`needs("name")` skips the test when the doctor says that this machine lacks it."""
    from dsec.doctor import diagnose

    checks = {check.name: check for check in diagnose()}

    def ask(name: str) -> None:
        check = checks[name]
        if not check.ok:
            pytest.skip(f"{name}: {check.detail}")

    return ask


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    from tests.harness import start_node

    node = start_node(tmp_path_factory.mktemp("node", numbered=False))
    yield node
    node.destroy()


@pytest.fixture
async def client(node: Node) -> AsyncIterator[DSecClient]:
    client = await node.client()
    yield client
    await client.close()


@pytest.fixture
def sync_client(node: Node) -> Iterator[SyncDSecClient]:
    from libdsec import SyncDSecClient

    with SyncDSecClient(node.url, api_key=node.key) as client:
        yield client


@pytest.fixture
def supervisor_pid(node: Node) -> Callable[[str], int]:
    from tests.harness import supervisor_pid as find

    return lambda sandbox_id: find(node, sandbox_id)


@pytest.fixture(scope="session")
def dsec(node: Node) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the CLI against the node: `dsec("ps", "--json")`; more environment by `env=`, stdin by `input=`."""

    def run(*args: str, env: dict[str, str] | None = None, timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
        more.setdefault("stdin", subprocess.DEVNULL if "input" not in more else None)
        if more["stdin"] is None:
            del more["stdin"]
        return subprocess.run(
            [str(Path(sys.executable).with_name("dsec")), *args], env={**node.client_env(), **(env or {})}, capture_output=True, text=True,
            timeout=timeout, check=False, **more,
        )  # fmt: skip

    return run


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that the test may kill and restart; everything of it is removed at the end."""
    from tests.harness import start_node

    node = start_node(tmp_path_factory.mktemp("own"))
    yield node
    node.destroy()


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    """What is beyond this machine. Of a module: the other lane may need it, too."""
    from tests.internet import Internet

    with Internet() as net:
        net.names = {
            "www.example.org": ["192.0.2.10", "2001:db8:1::10"], "other.example.org": ["192.0.2.11"], "db.example.net": ["192.0.2.20"],
            "private.example.org": ["10.1.2.3"], "metadata.example.org": ["169.254.169.254"], "mixed.example.org": ["192.0.2.12", "127.0.0.1"],
            "evil.example.com": ["192.0.2.66"],
        }  # fmt: skip
        net.say()
        yield net


# images -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def busybox_image(node: Node) -> str:
    return "busybox"


@pytest.fixture(scope="session")
def python_image(node: Node) -> str:
    return "bookworm"


@pytest.fixture(scope="session")
def git_image(python_image: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("git: not installed on the host")
    return python_image


@pytest.fixture(scope="session")
def app_image(node: Node, python_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from libdsec import SyncDSecClient

    tree = tmp_path_factory.mktemp("app")
    for path in ("srv", "home/app", "opt/x/bin", "etc"):
        (tree / path).mkdir(parents=True)
    os.chown(tree / "home/app", 1000, 1000)
    users = ("root:x:0:0:root:/root", "app:x:1000:1000::/home/app", "nobody:x:65534:65534::/")
    (tree / "etc/passwd").write_text("".join(f"{user}:/bin/bash\n" for user in users))
    (tree / "etc/group").write_text("root:x:0:\napp:x:1000:\nnogroup:x:65534:\n")
    path = "/opt/x/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with SyncDSecClient(node.url, api_key=node.key) as client:
        client.layers.build("app-files", kind="workspace", directory=str(tree))
        client.environments.create("app", [python_image, "app-files"], env={"PATH": path, "FOO": "bar"}, user="app", workdir="/srv")
    return "app"


# a link that breaks -------------------------------------------------------------------------------------------------------------


class Proxy:
    """Relays TCP on loopback to the node until `cut` breaks every open link."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.server: asyncio.Server | None = None
        self.links: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def client(self) -> DSecClient:
        from libdsec import DSecClient

        client = DSecClient(self.url, api_key=self.node.key)
        await client.open()
        return client

    def cut(self) -> None:
        """Reset every link; new ones may be made."""
        for writer in list(self.links):
            writer.transport.abort()

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._link, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self.server is not None
        self.server.close()
        self.cut()
        await self.server.wait_closed()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.node.port)
        self.links |= {writer, far_writer}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.transport.abort()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        self.links -= {writer, far_writer}


@pytest.fixture
async def tcp_proxy(node: Node) -> AsyncIterator[Proxy]:
    proxy = Proxy(node)
    await proxy.serve()
    yield proxy
    await proxy.close()
