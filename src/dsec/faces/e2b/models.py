"""Request bodies. A field that is not here is refused; one that is here and cannot be done is refused by its handler."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Timeout = Annotated[int, Meta(ge=0, le=10 * 366 * 86400)]  # seconds
Count = Annotated[int, Meta(ge=1, le=100)]


class Model(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """Names are camel case on the wire."""


class AutoResume(Model):
    enabled: bool = False


class Network(Model):
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    rules: dict[str, Any] | None = None
    egress_proxy: dict[str, Any] | None = None
    dns_servers: list[str] | None = None
    allow_public_traffic: bool | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")  # two spellings on one wire


class NewSandbox(Model):
    template_id: str = msgspec.field(name="templateID")
    timeout: Timeout | None = None
    auto_pause: bool = False
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool = True
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[Any] | None = None


class Connect(Model):
    timeout: Timeout | None = None
    memory: bool | None = None


class Resume(Model):
    timeout: Timeout | None = None
    auto_pause: bool | None = None


class Pause(Model):
    memory: bool | None = None
    require_healthy_guest: bool | None = None


class SetTimeout(Model):
    timeout: Timeout


class Refresh(Model):
    duration: Timeout | None = None


class Snapshot(Model):
    name: str | None = None
    memory: bool | None = None


class Fork(Model):
    timeout: Timeout | None = None
    count: Count = 1


# envd -----------------------------------------------------------------------------------------------------------------------------


class Selector(Model):
    pid: int | None = None
    tag: str | None = None


class ProcessConfig(Model):
    cmd: str
    args: list[str] = msgspec.field(default_factory=list)
    envs: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str | None = None


class Size(Model):
    rows: Annotated[int, Meta(ge=1, le=65535)] = 24
    cols: Annotated[int, Meta(ge=1, le=65535)] = 80


class Pty(Model):
    size: Size = msgspec.field(default_factory=Size)


class Start(Model):
    process: ProcessConfig
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool = True  # old clients do not say, and may write


class Select(Model):
    process: Selector


class Input(Model):
    stdin: bytes | None = None
    pty: bytes | None = None


class SendInput(Model):
    process: Selector
    input: Input


class StreamStart(Model):
    process: Selector


class StreamData(Model):
    input: Input


class StreamInput(Model):
    start: StreamStart | None = None
    data: StreamData | None = None
    keepalive: dict[str, Any] | None = None


class SendSignal(Model):
    process: Selector
    signal: str = "SIGNAL_UNSPECIFIED"


class Update(Model):
    process: Selector
    pty: Pty | None = None


class Empty(Model):
    pass


class Path(Model):
    path: str = ""


class Move(Model):
    source: str = ""
    destination: str = ""


class ListDir(Model):
    path: str = ""
    depth: Annotated[int, Meta(ge=0)] = 1


class Watch(Model):
    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class Watcher(Model):
    watcher_id: str = ""


# templates ------------------------------------------------------------------------------------------------------------------------


class NewTemplate(Model):
    name: str | None = None
    alias: str | None = None
    tags: list[str] = msgspec.field(default_factory=list)
    cpu_count: Annotated[int, Meta(ge=0)] | None = None
    memory_mb: Annotated[int, Meta(ge=0)] | None = msgspec.field(default=None, name="memoryMB")
    min_free_disk_mb: int | None = None


class Step(Model):
    type: str
    args: list[str] = msgspec.field(default_factory=list)
    files_hash: str | None = None
    force: bool | None = None
    force_upload: bool | None = None  # what follows was of use to the client alone
    resolve_symlinks: bool | None = None
    gzip: bool | None = None


class RegistryLogin(Model):
    type: str
    username: str = ""
    password: str = ""


class StartBuild(Model):
    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: RegistryLogin | None = None
    steps: list[Step] = msgspec.field(default_factory=list)
    start_cmd: str | None = None
    ready_cmd: str | None = None
    force: bool | None = None
