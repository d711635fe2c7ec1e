"""Template builds: steps become a Dockerfile that the node builds; a template is the environment that comes of it.

A build is this process's: uploaded files lie in a directory of its own, and both go with it; what a process that was killed left is
removed by the next one. The node keeps what its steps made, so that a build that is started again begins where the first one was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import gzip
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO, Any, cast

from dsec.faces.e2b.boxes import Boxes
from dsec.faces.e2b.control import number, timestamp
from dsec.faces.e2b.errors import Failure, invalid, not_found, refused
from dsec.faces.e2b.http import Request
from dsec.faces.e2b.keys import Keys
from dsec.faces.e2b.models import NewTemplate, StartBuild, Step
from libdsec import errors, tars
from libdsec.wire import Limits, Progress

HOME = "dsec-e2b-"  # how names of directories for uploads begin
UPLOAD_MAX = 4 << 30  # bytes of one upload, packed and unpacked
KEPT = 200  # builds whose outcome is remembered
LINES_MAX = 20000
_PAGE = 100
_HASH = re.compile(r"[0-9a-f]{16,128}")


@dataclasses.dataclass
class Build:
    """One build and what it said."""

    template: str
    names: list[str]
    limits: Limits
    status: str = "waiting"
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reason: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None

    def say(self, text: str, level: str = "info") -> None:
        """A line of its log."""
        if len(self.lines) < LINES_MAX:
            self.lines += [{"timestamp": timestamp(time.time()), "message": line, "level": level} for line in text.splitlines()]


class Builds:
    """Handlers."""

    def __init__(self, boxes: Boxes, keys: Keys) -> None:
        self.boxes = boxes
        self.keys = keys
        self._builds: dict[str, Build] = {}
        self._made: Path | None = None
        self._lock = -1  # held while we live

    async def close(self) -> None:
        """End what runs; nothing stays on the disk."""
        tasks = [build.task for build in self._builds.values() if build.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._made is not None:
            await asyncio.to_thread(shutil.rmtree, self._made, ignore_errors=True)
            os.close(self._lock)

    async def request(self, request: Request) -> None:
        """A build is asked for; its steps come later."""
        wanted = await request.decode(NewTemplate)
        name, _, tag = (wanted.name or wanted.alias or "").partition(":")
        if not name:
            raise invalid("a template needs a name")
        if wanted.min_free_disk_mb:
            raise refused("minFreeDiskMb", "disk_unsupported")
        tags = [*dict.fromkeys([*([tag] if tag else []), *wanted.tags])]
        names = [f"{name}:{one}" for one in tags] or [name]
        build_id = str(uuid.uuid4())
        limits = Limits(memory_mb=wanted.memory_mb or None, cpu_cores=wanted.cpu_count or None)
        while len(self._builds) >= KEPT and (over := next((key for key, one in self._builds.items() if one.status in _OVER), None)):
            del self._builds[over]
        self._builds[build_id] = Build(name, names, limits)
        reply = {"templateID": name, "buildID": build_id, "public": False, "names": names, "tags": tags, "aliases": [name]}
        await request.json(reply, 202)

    async def upload_link(self, request: Request, template: str, files: str) -> None:
        """Where to send the files of a COPY step, and whether they are there."""
        _check_hash(files)
        url = f"{request.scheme}://{request.header(b'host') or ''}/uploads/{files}/{self.keys.upload_token(files)}"
        await request.json({"present": (self._home / files).exists(), "url": url, "headers": {}}, 201)

    async def upload(self, request: Request, files: str, token: str) -> None:
        """The tar of the files of a COPY step. The address itself is the permission."""
        _check_hash(files)
        if not self.keys.is_upload_token(files, token):
            raise Failure(401, "this is no address for an upload", "unauthenticated")
        fresh = self._home / f"{files}.{secrets.token_hex(4)}"
        size = 0
        try:
            with fresh.open("wb") as file:
                async for part in request.chunks():
                    size += len(part)
                    if size > UPLOAD_MAX:
                        raise Failure(413, f"an upload is at most {UPLOAD_MAX} bytes", "too_large")
                    await asyncio.to_thread(file.write, part)
            fresh.replace(self._home / files)
        finally:
            fresh.unlink(missing_ok=True)
        await request.empty(200)

    async def start(self, request: Request, template: str, build_id: str) -> None:
        """The steps; the build runs from here on."""
        wanted = await request.decode(StartBuild)
        build = self._get(template, build_id)
        if build.status != "waiting":
            raise Failure(409, f"build {build_id} was started already", "build_started")
        if bool(wanted.from_image) == bool(wanted.from_template):
            raise invalid("one of fromImage and fromTemplate must be given")
        for given, what in ((wanted.start_cmd, "startCmd"), (wanted.ready_cmd, "readyCmd")):
            if given:
                raise refused(f"{what}: an environment holds files, no processes", "start_cmd_unsupported")
        if wanted.from_image_registry is not None and wanted.from_image_registry.type != "registry":
            raise refused(f"a login of type {wanted.from_image_registry.type[:40]!r}", "registry_unsupported")
        for step in wanted.steps:
            _line(step, 0, "root")  # what cannot be is refused before anything is done
            if step.type == "COPY" and not (self._home / (step.files_hash or "-")).exists():
                raise invalid("the files of a COPY step were not uploaded", "files_missing")
        build.status = "building"
        build.task = asyncio.ensure_future(self._run(build, wanted))
        await request.empty(202)

    async def status(self, request: Request, template: str, build_id: str) -> None:
        """How far it is. Clients ask until no more lines come."""
        params = request.only("logsOffset", "limit", "level", "source")
        build = self._get(template, build_id)
        offset = 0 if params.get("logsOffset", "0") == "0" else number(params, "logsOffset", 0, 1 << 40)
        lines = build.lines[offset : offset + number(params, "limit", _PAGE, _PAGE)]
        reply = {"templateID": build.template, "buildID": build_id, "status": build.status, "logs": [], "logEntries": lines}
        await request.json({**reply, **({"reason": build.reason} if build.reason is not None else {})})

    @property
    def _home(self) -> Path:
        """Made when it is needed: most faces build nothing, and one that is killed cannot clean up."""
        if self._made is None:
            fresh = Path(tempfile.mkdtemp(prefix=f"new-{HOME}"))
            self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._made = fresh.rename(fresh.with_name(fresh.name.removeprefix("new-")))  # nobody has seen it without the lock
        return self._made

    # how ------------------------------------------------------------------------------------------------------------------------
    def _get(self, template: str, build_id: str) -> Build:
        build = self._builds.get(build_id)
        if build is None or build.template != template:
            raise not_found(f"build {build_id!r} of template {template!r}", "build_not_found")
        return build

    async def _run(self, build: Build, wanted: StartBuild) -> None:
        context = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="context-", dir=self._home))
        try:
            base, user = await self._base(build, wanted)
            text = [f"FROM {base}"]
            for number, step in enumerate(wanted.steps):
                if step.type == "COPY":
                    assert step.files_hash is not None
                    await asyncio.to_thread(_unpack, self._home / step.files_hash, context / f"step{number}")
                if wanted.force or step.force:
                    text.append(f"ARG DSEC_AGAIN{number}={secrets.token_hex(8)}")  # no step below it is taken from the cache
                text += _line(step, number, user)
                user = step.args[0] if step.type == "USER" else user
            await asyncio.to_thread((context / "Dockerfile").write_text, "\n".join(text) + "\n")

            async def heard(progress: Progress) -> None:
                if progress.message:
                    build.say(progress.message)

            for name in build.names:
                made = await self.boxes.client.images.build(name, context, on_progress=heard)
                if build.limits != Limits():
                    await self.boxes.client.environments.create(
                        name, made.layers, env=made.env, user=made.user, workdir=made.workdir, entrypoint=made.entrypoint, cmd=made.cmd,
                        labels=made.labels, limits=build.limits,
                    )  # fmt: skip
            build.say("the template is ready")
            build.status = "ready"
        except (errors.DSecError, OSError, EOFError) as error:
            message = error.message if isinstance(error, errors.DSecError) else str(error)
            build.say(message, "error")
            build.reason, build.status = {"message": message}, "error"
        except asyncio.CancelledError:
            build.reason, build.status = {"message": "the face was stopped"}, "error"
            raise
        except Exception as error:
            build.reason, build.status = {"message": f"an internal error: {error}"}, "error"
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, context, ignore_errors=True)

    async def _base(self, build: Build, wanted: StartBuild) -> tuple[str, str]:
        """The environment below and its user: that of a template, or of an image, which is brought if it is not there."""
        name = wanted.from_template or wanted.from_image or ""
        known = self.boxes.settings.templates.get(name, name)
        try:
            found = await self.boxes.client.environments.get(known)
            return found.name, found.user
        except (errors.LayerNotFound, errors.InvalidRequest):
            if wanted.from_template or any(layer.name == known for layer in await self.boxes.client.layers.list()):
                return known, "root"
        login = wanted.from_image_registry
        build.say(f"pulling {known}")
        made = await self.boxes.client.images.pull(
            known, username=login.username if login else None, password=login.password if login else None
        )
        return made.name, made.user


_OVER = ("ready", "error")


def sweep() -> None:
    """Remove the directories of those that were killed: ours, and locked by nobody."""
    for path in Path(tempfile.gettempdir()).glob(f"{HOME}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _line(step: Step, number: int, user: str) -> list[str]:
    """A step as lines of a Dockerfile; `user`: who runs commands at this place. A login shell runs them, as everywhere on this wire."""
    args = step.args
    if step.type == "RUN" and len(args) in (1, 2):
        run = f"RUN {json.dumps(['/bin/bash', '-l', '-c', args[0]])}"
        return [run] if len(args) == 1 or not args[1] else [f"USER {_word(args[1])}", run, f"USER {user}"]
    if step.type == "COPY" and 2 <= len(args) <= 4:
        if step.files_hash is None:
            raise invalid("a COPY step without filesHash")
        _check_hash(step.files_hash)
        owner, mode = (*args[2:], "", "")[:2]
        flags = (f"--chown={_word(owner)} " if owner else "") + (f"--chmod={_word(mode)} " if mode else "")
        source = os.path.normpath(args[0])
        if source.startswith(("/", "..")):
            raise invalid(f"COPY source {args[0][:80]!r} is not below the context")
        return [f"COPY {flags}{json.dumps([f'step{number}/{source}', args[1]])}"]
    if step.type == "ENV" and args and len(args) % 2 == 0:
        return [f"ENV {_word(key)}={_quoted(value)}" for key, value in zip(args[::2], args[1::2], strict=True)]
    if step.type in ("WORKDIR", "USER") and len(args) == 1:
        return [f"{step.type} {_word(args[0])}"]
    raise refused(f"step {step.type[:40]!r} with {len(args)} arguments", "step_unsupported")


def _word(text: str) -> str:
    if not text or any(c.isspace() or c in "\\\"'$" or not c.isprintable() for c in text):
        raise invalid(f"{text[:80]!r} cannot stand in a step")
    return text


def _quoted(text: str) -> str:
    if any(not c.isprintable() for c in text):
        raise invalid("a value of ENV holds a line break or another control character")
    return '"' + re.sub(r'([\\"$])', r"\\\1", text) + '"'


def _check_hash(text: str) -> None:
    if not _HASH.fullmatch(text):
        raise invalid(f"{text[:80]!r} is no hash of files")


def _unpack(archive: Path, directory: Path) -> None:
    """What a client sent is not trusted: nothing is written outside the directory."""
    with archive.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with cast(IO[bytes], gzip.open(file)) if packed else file as source:
            tars.unpack(source, str(directory), "keep", UPLOAD_MAX)
