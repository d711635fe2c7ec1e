"""Every route of the API, in one table: what is dispatched and what the OpenAPI page says are the same."""
from __future__ import annotations

from dsec.apiserver import commands, files, fncalls, guard, layers, network, pages, ports, sandboxes
from dsec.apiserver.route import Param, Route
from libdsec.copies import RollbackRequest, SnapshotInfo, SnapshotRequest
from libdsec.egress import EventPage, NetworkInfo, NetworkRequest
from libdsec.fncall import BATCH_BODY, FnBatch, FnCall, FnResult, LanguageInfo
from libdsec.nodes import NodeInfo
from libdsec.residue import Canary, PlantRequest, ScanReport, ScanRequest
from libdsec.secrets import SecretInfo, SecretSpec
from libdsec.verdicts import Assessment
from libdsec.wire import (
    STREAM_TYPE,
    TUNNEL,
    BatchItem,
    BatchRequest,
    CommandInfo,
    EnvironmentInfo,
    EnvironmentPull,
    EnvironmentSpec,
    ExecResult,
    ExecSpec,
    FileInfo,
    ForkRequest,
    GcRequest,
    GcResult,
    ImagePull,
    LayerInfo,
    LayerLease,
    LayerPull,
    LayerRequest,
    LeaseRequest,
    MkdirRequest,
    MoveRequest,
    PackRequest,
    PackResult,
    PoolInfo,
    PoolRequest,
    PtySize,
    SandboxInfo,
    SandboxSpec,
    SessionInfo,
    SessionSpec,
    SignalRequest,
    SquashRequest,
    UnpackResult,
    Usage,
    VersionInfo,
)  # fmt: skip

OCTETS = "application/octet-stream"
TAR = "application/x-tar"
LINES = "application/x-ndjson"

_S = "/v1/sandboxes/{id}"
_C = _S + "/commands/{command}"
_P = _S + "/ports/{port}"
_PATH = Param("path", "an absolute path in the sandbox", required=True)
_USER = Param("user", "the sandbox user whose rights apply; the sandbox's own when not given")
_LABEL = Param("label", "`key=value`; all that are given must match", many=True)
_MEMORY = Param("memory", "1: its running commands go on later, or it is an error; 0: they end; else: if they can", kind="boolean")
_KEY = Param("Idempotency-Key", "the same key and request give the same sandbox again")
_SWITCHED = {101: "The connection is that of the port from here on."}
_ANY = {502: "Nothing listens, or what does is not HTTP; every other status is the program's."}
_RUNNING = {202: "It still runs: an ExecResult with the ending `running` and no output. Ask again with the wait route."}

ROUTES: tuple[Route, ...] = (
    # sandboxes
    Route("POST", "/v1/sandboxes", sandboxes.create, "Create a sandbox", body=SandboxSpec, reply=SandboxInfo, headers=(_KEY,)),
    Route("POST", "/v1/sandboxes:batch", sandboxes.create_batch, "Create equal sandboxes; each item is a sandbox or an error",
          body=BatchRequest, reply=list[BatchItem]),
    Route("GET", "/v1/sandboxes", sandboxes.list_all, "List sandboxes; live ones unless `state` says otherwise", reply=list[SandboxInfo],
          params=(_LABEL, Param("state", "creating, running, hibernated, ended or all"), Param("name", "the one of this name"))),
    Route("DELETE", "/v1/sandboxes", sandboxes.stop_many, "Stop the sandboxes with these labels", reply=list[SandboxInfo],
          params=(_LABEL, Param("everything", "1: without labels, all of them", kind="boolean"))),
    Route("GET", _S, sandboxes.get, "One sandbox, live or ended", reply=SandboxInfo),
    Route("DELETE", _S, sandboxes.stop, "Stop a sandbox; no error when it has ended", reply=SandboxInfo),
    Route("PATCH", _S, sandboxes.lease, "Change its lifetimes", body=LeaseRequest, reply=SandboxInfo),
    Route("GET", _S + "/usage", sandboxes.usage, "What it uses now", reply=Usage),
    Route("GET", _S + "/network", network.get_rules, "Its network rules", reply=NetworkInfo),
    Route("PUT", _S + "/network", network.set_rules, "Other network rules, at once; connections that they do not allow are cut",
          body=NetworkRequest, reply=NetworkInfo),
    Route("GET", _S + "/events", network.events, "What it did or tried that is told of", reply=EventPage,
          params=(Param("kind", "only of this kind"), Param("offset", "the first", kind="integer"),
                  Param("limit", "at most so many", kind="integer"))),
    # commands
    Route("POST", _S + "/exec", commands.execute, "Run a command to its end. It runs on when the client goes", body=ExecSpec,
          reply=ExecResult,
          params=(Param("wait", "at most so many seconds, then 202", kind="number"),
                  Param("stream", f"1: the reply is {STREAM_TYPE}, lossless: a client that does not read holds the command up",
                  kind="boolean")),
          also=_RUNNING),
    Route("POST", _S + "/commands", commands.start, "Start a command in the background", body=ExecSpec, reply=CommandInfo),
    Route("GET", _S + "/commands", commands.list_all, "Its commands, running and ended", reply=list[CommandInfo]),
    Route("GET", _C, commands.get, "One command", reply=CommandInfo),
    Route("DELETE", _C, commands.kill, "Kill a command and all that it started; no error when it has ended"),
    Route("GET", _C + "/wait", commands.wait, "The result, when there is one", reply=ExecResult,
          params=(Param("timeout", "at most so many seconds, then 202; without it there is no limit", kind="number"),), also=_RUNNING),
    Route("GET", _C + "/stream", commands.stream, "Output from these offsets, then what comes, then the end. Never slows the "
          "command: what is no longer kept shows as a gap", reply=STREAM_TYPE,
          params=(Param("stdout_offset", "first byte of stdout", kind="integer"),
                  Param("stderr_offset", "first byte of stderr", kind="integer"),
                  Param("follow", "0: only what there is", kind="boolean"))),
    Route("GET", _C + "/log", commands.log, "Kept bytes of one stream; X-Dsec-Offset is where they begin, X-Dsec-Next where to go on",
          reply=OCTETS,
          params=(Param("stream", "stdout or stderr"), Param("offset", "first byte", kind="integer"),
                  Param("limit", "at most so many bytes", kind="integer"))),
    Route("POST", _C + "/stdin", commands.stdin, "Write the body to its stdin; the body is read at the pace of the command", body=OCTETS,
          params=(Param("close", "1: then end of input", kind="boolean"),)),
    Route("POST", _C + "/signal", commands.send_signal, "Send a signal", body=SignalRequest),
    Route("POST", _C + "/resize", commands.resize, "Set the size of its terminal", body=PtySize),
    # sessions
    Route("POST", _S + "/sessions", commands.open_session, "Open a named shell session", body=SessionSpec, reply=SessionInfo),
    Route("GET", _S + "/sessions", commands.sessions, "Open sessions", reply=list[SessionInfo]),
    Route("DELETE", _S + "/sessions/{name}", commands.close_session, "Close a session and end what runs in it"),
    # files
    Route("GET", _S + "/files", files.read, "The content of a file", reply=OCTETS,
          params=(_PATH, _USER, Param("offset", "first byte", kind="integer"), Param("length", "at most so many bytes", kind="integer"))),
    Route("PUT", _S + "/files", files.write, "Create or replace a file; it appears whole or not at all", body=OCTETS, reply=FileInfo,
          params=(_PATH, _USER, Param("mode", "permission bits, octal"), Param("parents", "1: make the directories above it",
                  kind="boolean"),
                  Param("overwrite", "0: an error when it is there", kind="boolean"))),
    Route("DELETE", _S + "/files", files.remove, "Remove a file or an empty directory",
          params=(_PATH, _USER, Param("recursive", "1: with everything below it", kind="boolean"))),
    Route("GET", _S + "/files/stat", files.stat, "What a path is", reply=FileInfo,
          params=(_PATH, _USER, Param("follow", "1: follow a symbolic link", kind="boolean"))),
    Route("GET", _S + "/files/watch", files.watch, "What happens in a directory, one WatchEvent in JSON a line: `start`, the events, `end` "
          "when the directory has gone; a line with `error` is the last one, a body that ends otherwise broke off", reply=LINES,
          params=(_PATH, _USER, Param("recursive", "1: the directories below it too", kind="boolean"))),
    Route("GET", _S + "/files/list", files.list_directory, "Entries of a directory", reply=list[FileInfo],
          params=(_PATH, _USER, Param("depth", "levels, 1 when not given", kind="integer"))),
    Route("POST", _S + "/files/mkdir", files.mkdir, "Make a directory", body=MkdirRequest),
    Route("POST", _S + "/files/move", files.move, "Rename", body=MoveRequest),
    Route("GET", _S + "/archive", files.download, "A directory as a tar archive", reply=TAR,
          params=(_PATH, _USER, Param("exclude", "a pattern of names to leave out", many=True))),
    Route("PUT", _S + "/archive", files.upload, "Unpack a tar archive below a directory, which is made if it is not there",
          body=TAR, reply=UnpackResult,
          params=(_PATH, _USER)),
    Route("POST", _S + "/pause", sandboxes.pause, "Let nothing inside run; whatever needs it to run resumes it first", reply=SandboxInfo),
    Route("POST", _S + "/resume", sandboxes.resume, "Let it run on; a hibernated one wakes", reply=SandboxInfo),
    Route("POST", _S + "/hibernate", sandboxes.hibernate, "Keep nothing of it in memory; whatever needs it to run wakes it first",
          reply=SandboxInfo, params=(_MEMORY,)),
    Route("POST", "/v1/sandboxes:pause", sandboxes.pause_many, "Pause all that have these labels", reply=list[BatchItem],
          params=(_LABEL,)),
    Route("POST", "/v1/sandboxes:resume", sandboxes.resume_many, "Resume all that have these labels, or wake them", reply=list[BatchItem],
          params=(_LABEL,)),
    Route("POST", "/v1/sandboxes:hibernate", sandboxes.hibernate_many, "Hibernate all that have these labels", reply=list[BatchItem],
          params=(_LABEL, _MEMORY)),
    Route("POST", _S + "/rollback", sandboxes.rollback, "Give it the files of a snapshot; all its processes end", body=RollbackRequest,
          reply=SandboxInfo),
    Route("POST", _S + "/snapshots", sandboxes.snapshot, "Copy its files as they are at one instant", body=SnapshotRequest,
          reply=SnapshotInfo),
    Route("POST", _S + "/fork", sandboxes.fork, "Make copies of it, if asked with memory", body=ForkRequest, reply=list[BatchItem]),
    Route("GET", "/v1/snapshots", sandboxes.snapshots, "All snapshots, newest first", reply=list[SnapshotInfo],
          params=(Param("sandbox", "only of this sandbox"),)),
    Route("GET", "/v1/snapshots/{snapshot}", sandboxes.get_snapshot, "One snapshot", reply=SnapshotInfo),
    Route("DELETE", "/v1/snapshots/{snapshot}", sandboxes.remove_snapshot, "Forget a snapshot", reply=SnapshotInfo),
    Route("GET", "/v1/pools", sandboxes.pools, "What is made ahead", reply=list[PoolInfo]),
    Route("PUT", "/v1/pools", sandboxes.set_pool, "Keep so many sandboxes of one kind ready, in the place of what was asked for that kind",
          body=PoolRequest, reply=PoolInfo),
    Route("DELETE", "/v1/pools/{pool}", sandboxes.remove_pool, "Keep none of this pool any more", reply=PoolInfo),
    Route("POST", _S + "/pack", sandboxes.pack, "Make a layer and an environment of what the sandbox changed", body=PackRequest,
          reply=PackResult),
    # function calls
    Route("POST", "/v1/fncalls", fncalls.run, "Run a function call; it ends when the client goes, unless it has a key", body=FnCall,
          reply=FnResult, limit=BATCH_BODY),
    Route("POST", "/v1/fncalls:batch", fncalls.run_many, "Run many; the reply is a stream of results in the order in which they end. What "
          "has not ended when the client goes is ended", body=FnBatch, reply=STREAM_TYPE, limit=BATCH_BODY),
    Route("GET", "/v1/fncalls/languages", fncalls.languages, "Languages of the judge, and which an environment has",
          reply=list[LanguageInfo], params=(Param("image", "the environment", required=True),)),
    # layers and environments
    Route("GET", "/v1/layers", layers.list_all, "All layers, newest first", reply=list[LayerInfo]),
    Route("POST", "/v1/layers", layers.build, "Build a layer on the node; the reply is progress in lines, the last has `result` or `error`",
          body=LayerRequest, reply=LINES),
    Route("PUT", "/v1/layers", layers.upload, "Make a layer of a tar archive, plain or compressed; the reply is as for a build",
          body=TAR, reply=LINES,
          params=(Param("name", "its name", required=True), Param("kind", "base, workspace, toolkit or diff"),
                  Param("parent", "a layer below it", many=True), Param("prefix", "where the content is put inside the layer"))),
    Route("GET", "/v1/layers/{ref}", layers.get, "One layer, by name or digest", reply=LayerInfo),
    Route("DELETE", "/v1/layers/{ref}", layers.remove, "Remove a name of a layer, and with its last name the layer", reply=LayerInfo),
    Route("POST", "/v1/layers/{ref}/verify", layers.verify, "Read a layer's file again and compare its digest", reply=LayerInfo),
    Route("POST", "/v1/images", layers.pull_image, "Bring an image from a registry; the reply is progress in lines, the last has "
          "an environment as its `result`, or `error`", body=ImagePull, reply=LINES),
    Route("PUT", "/v1/images", layers.import_image, "Import a tar of an OCI layout or of `docker save`; the reply is as for a pull",
          body=TAR, reply=LINES,
          params=(Param("name", "`name[:tag]` of the environment; the image's own when not given"),
                  Param("image", "which one, where the archive has several"),
                  Param("platform", "os/architecture, linux/amd64 when not given"))),
    Route("POST", "/v1/layers/{ref}/push", layers.push, "Send a layer and those below it to the node's store; the reply is progress",
          reply=LINES),
    Route("POST", "/v1/layers:pull", layers.pull, "Bring a layer from the node's store; the reply is progress", body=LayerPull,
          reply=LINES),
    Route("POST", "/v1/layers/{ref}/lease", layers.lease, "Hold a layer against removal and gc", body=LayerLease, reply=LayerInfo),
    Route("POST", "/v1/layers:gc", layers.gc, "Remove layers that lost their names to newer ones and that nothing needs", body=GcRequest,
          reply=GcResult),
    Route("PUT", "/v1/images/build", layers.build_image, "Build a Dockerfile; the body is a tar of its context. The reply is as for a pull",
          body=TAR, reply=LINES,
          params=(Param("name", "`name[:tag]` of the environment", required=True),
                  Param("dockerfile", "its path in the context, Dockerfile when not given"),
                  Param("target", "the stage to build, the last when not given"), Param("arg", "`KEY=VALUE` of an ARG", many=True))),
    Route("GET", "/v1/environments", layers.list_environments, "All environments", reply=list[EnvironmentInfo]),
    Route("GET", "/v1/environments/{name}", layers.get_environment, "One environment, by `name[:tag]`", reply=EnvironmentInfo),
    Route("PUT", "/v1/environments/{name}", layers.put_environment, "Bind a name to layers, ENV, USER and WORKDIR", body=EnvironmentSpec,
          reply=EnvironmentInfo),
    Route("POST", "/v1/environments/{name}/squash", layers.squash, "Make one layer of the diffs on top of it", body=SquashRequest,
          reply=EnvironmentInfo),
    Route("POST", "/v1/environments/{name}/push", layers.push_environment, "Send an environment and its layers to the node's store; the "
          "reply is progress", reply=LINES),
    Route("POST", "/v1/environments:pull", layers.pull_environment, "Bring an environment and its layers from the node's store; the reply "
          "is progress, the last line has an environment as its `result`", body=EnvironmentPull, reply=LINES),
    Route("DELETE", "/v1/environments/{name}", layers.remove_environment, "Forget a name"),
    # ports
    Route("GET", _P, ports.tunnel, f"The bytes of a TCP port in the sandbox: an upgrade to `{TUNNEL}`", also=_SWITCHED, raw=True),
    *(Route(method, _P + "/{path*}", ports.proxy, "HTTP of a program in the sandbox, upgrades too, but for the Authorization header",
            body="*/*" if method in ("POST", "PUT", "PATCH") else None, reply="*/*", also=_ANY, raw=True)
      for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")),
    # canaries and scans
    Route("POST", _S + "/canaries", guard.plant, "Plant canaries", body=PlantRequest, reply=list[Canary]),
    Route("GET", _S + "/canaries", guard.canaries, "Its canaries", reply=list[Canary]),
    Route("POST", _S + "/scan", guard.scan, "Look for canaries and answers in its logs, its files and in layers", body=ScanRequest,
          reply=ScanReport),
    Route("GET", _S + "/verdicts", guard.verdicts, "What its record amounts to", reply=Assessment),
    Route("POST", _S + "/verdicts", guard.assess, "The same, with what a scan finds", body=ScanRequest, reply=Assessment),
    # secrets
    Route("PUT", "/v1/secrets/{name}", guard.put_secret, "Set a secret, which nobody can read back", body=SecretSpec, reply=SecretInfo),
    Route("GET", "/v1/secrets", guard.secrets, "All secrets, without their values", reply=list[SecretInfo]),
    Route("DELETE", "/v1/secrets/{name}", guard.remove_secret, "Forget a secret", reply=SecretInfo),
    # the node
    Route("GET", "/v1/node", sandboxes.node, "What this node is and can do", reply=NodeInfo),
    Route("GET", "/v1/version", sandboxes.version, "What answers here", reply=VersionInfo),
    Route("GET", "/metrics", sandboxes.metrics, "Metrics for Prometheus", reply="text/plain"),
    Route("GET", "/healthz", sandboxes.health, "200 while the node serves", reply="application/json", open=True),
    Route("GET", "/openapi.json", pages.openapi, "This description", reply="application/json", open=True),
    Route("GET", "/docs", pages.docs, "This description as a page", reply="text/html", open=True),
)  # fmt: skip
