"""Images: what the node and the edge ask. Resolve names to layers (cached), pin what sandboxes use, build, import, list, remove, check.

One object per node process, on its event loop. Several processes may share a state directory: the catalog is SQLite, files are published
by rename, and a change by another process empties the cache. Pins are memory: the edge pins again from its journal when it starts, before
it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from dsec.images import diffs, gc, whole
from dsec.images.build import Build, Origin, Source, debian_source, directory_source
from dsec.images.catalog import Catalog
from dsec.images.dockerfile.builder import Runner
from dsec.images.model import DIGEST, KINDS, MAX_LAYERS, DiffOrigin, Layer, ResolvedImage, check_name, split_reference
from dsec.images.remote import blobs, exchange
from dsec.images.remote.service import Remote, RemoteSettings
from dsec.images.store import LayerStore
from dsec.images.tarstream import Caps, clean
from dsec.linux.tools import Tools
from libdsec.errors import BuildFailed, DSecError, InvalidRequest, LayerInvalid, LayerNotFound
from libdsec.wire import (
    EnvironmentInfo,
    EnvironmentSpec,
    GcResult,
    ImagePull,
    LayerInfo,
    LayerRequest,
    Limits,
    PackRequest,
    PackResult,
    Progress,
)

PARALLEL_BUILDS = 2
Layers = list[LayerInfo]  # inside the class `list` is a method
Names = list[str]
Environments = list[EnvironmentInfo]
CACHED = 4096
MAX_LEASE = 30 * 86400


class Images:
    """See the module's text. `on_remove` is awaited with a digest before its file goes (the edge unmounts it there)."""

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        tools: Tools | None = None,
        caps: Caps = Caps(),  # noqa: B008 - frozen
        remote: RemoteSettings = RemoteSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.state = Path(state_dir)
        self.tools = tools or Tools()
        self.caps = caps
        self.on_remove: Callable[[str], Awaitable[None]] | None = None
        self._store = LayerStore(self.state)
        self._store.sweep()
        self.remote = Remote(self.state, remote)
        self.remote.evict = self.make_room
        self._catalog = Catalog(self.state / "catalog.db")
        self._cache: dict[tuple[str | None, tuple[str, ...] | None], ResolvedImage] = {}
        self._generation: tuple[int, int] = (-1, -1)
        self._known: dict[str, tuple[int, str | None]] = {}
        self._pins: dict[str, frozenset[str]] = {}
        self._publishing = asyncio.Lock()  # a build must not find the file of a layer that is being removed
        self._slots = asyncio.Semaphore(PARALLEL_BUILDS)

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    # ----------------------------------------------------------------------------------------------------------------- resolve and pin

    async def resolve(self, image: str | None, layers: Names | None) -> ResolvedImage:
        """What `image` (environment `name[:tag]`, layer name, `sha256:...`) or the list `layers` stands for now, base first.

        A layer named as an image brings its parents; a list is taken as it is. Raises LayerNotFound naming what is missing, LayerInvalid
        when an image file is damaged or gone. Does not wait: `pin` in the same step of the loop holds what was resolved.
        """
        return self._look(image, layers)

    def limits(self, image: str | None) -> Limits:
        """What an image gives sandboxes that ask for no limits; none for what is no environment or not there."""
        try:
            return self._look(image, None).limits if image is not None else Limits()
        except DSecError:
            return Limits()  # `resolve` tells it

    def _look(self, image: str | None, layers: Names | None) -> ResolvedImage:
        self._refresh()
        key = (image, tuple(layers) if layers is not None else None)
        found = self._cache.get(key)
        if found is None:
            found = self._resolve(image, layers)
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[key] = found
        return found

    def _refresh(self) -> None:
        generation = self._catalog.generation()
        if generation != self._generation:
            self._cache.clear()
            self._known = self._catalog.digests()
            self._generation = generation

    def _resolve(self, image: str | None, layers: Names | None) -> ResolvedImage:
        if (image is None) == (layers is None):
            raise InvalidRequest("give either an image or a list of layers", field="image")
        if layers is not None:
            if not layers:
                raise InvalidRequest("the list of layers is empty", field="layers")
            return self._resolved(None, [self._digest(layer) for layer in layers])
        assert image is not None
        if not DIGEST.fullmatch(image):
            environment = self._catalog.environment(*split_reference(image))
            if environment is not None:
                return self._resolved(
                    image, environment.layers, environment.env, environment.user, environment.workdir, environment.limits
                )
        chain: Names = []
        self._chain(self._digest(image, "environment or layer"), chain)
        return self._resolved(image, chain)

    def _digest(self, reference: str, what: str = "layer") -> str:
        found = self._catalog.find(reference)
        if found is None:
            if not reference.startswith("sha256:"):
                split_reference(reference)
            elif not DIGEST.fullmatch(reference):
                raise InvalidRequest(f"{reference!r} is not a digest: sha256: and 64 hexadecimal digits", layer=reference)
            raise LayerNotFound(f"no {what} {reference!r}", layer=reference)
        return found

    def _chain(self, digest: str, chain: Names) -> None:
        for parent in self._catalog.parents(digest):
            self._chain(parent, chain)
        if digest not in chain:
            chain.append(digest)

    def _resolved(
        self,
        name: str | None,
        digests: Names,
        env: dict[str, str] | None = None,
        user: str = "root",
        workdir: str = "/",
        limits: Limits | None = None,
    ) -> ResolvedImage:
        if len(digests) > MAX_LAYERS:
            raise InvalidRequest(f"{len(digests)} layers; a sandbox takes at most {MAX_LAYERS}", field="layers")
        if len(set(digests)) != len(digests):
            twice = next(d for d in digests if digests.count(d) > 1)
            raise InvalidRequest(f"layer {twice} is named twice", field="layers")
        found = []
        for digest in digests:
            size, damaged = self._known[digest]
            layer = self._store.layer(digest)
            if damaged is None:
                try:
                    right = self._store.size(layer) == size
                    damaged = None if right else f"the image file of layer {digest} has a wrong size: {layer.path}"
                except FileNotFoundError:
                    damaged = f"the image file of layer {digest} is gone: {layer.path}"
            if damaged is not None:
                raise LayerInvalid(damaged, layer=digest)
            found.append(layer)
        return ResolvedImage(name, tuple(found), dict(env or {}), user, workdir, limits or Limits())

    def pin(self, digests: Iterable[str], sandbox_id: str) -> None:
        """These layers are used by this sandbox until `unpin`. LayerNotFound when one is gone."""
        self._refresh()
        wanted = frozenset(digests)
        for digest in wanted:
            if digest not in self._known:
                raise LayerNotFound(f"no layer {digest}", layer=digest)
        self._pins[sandbox_id] = wanted

    def unpin(self, sandbox_id: str) -> None:
        """The sandbox is gone. Unknown ids are fine."""
        self._pins.pop(sandbox_id, None)

    def _pinned(self, digest: str) -> Names:
        return [f"{_holder(name)} {name}" for name, digests in self._pins.items() if digest in digests]

    # -------------------------------------------------------------------------------------------------------------------------- layers

    async def list(self) -> Layers:
        """Every name of every layer, newest first."""
        found = await asyncio.to_thread(self._catalog.layers)
        for layer in found:
            layer.used_by += self._pinned(layer.digest)
        return found

    async def get(self, reference: str) -> LayerInfo:
        """The newest layer of a name, or the layer of a digest."""
        layer = self._catalog.layer(self._digest(reference), reference)
        layer.used_by += self._pinned(layer.digest)
        return layer

    async def remove(self, reference: str) -> LayerInfo:
        """Remove a layer (the last name, or a digest) or one name of it. LayerInUse names the users."""
        layer = await self.get(reference)
        _, gone = self._catalog.remove(reference, self._pinned(layer.digest))
        if gone:
            if self.on_remove is not None:
                await self.on_remove(layer.digest)
            async with self._publishing:
                if self._catalog.find(layer.digest) is None:  # not built again meanwhile
                    await self.remote.forget(layer.digest)
                    self._store.remove(layer.digest)
        return layer

    async def lease(self, reference: str, holder: str, seconds: float) -> LayerInfo:
        """Hold a layer for so long against removal and gc; 0 lets go of it."""
        if not 0 < len(holder) <= 128 or not holder.isprintable():
            raise InvalidRequest("holder: 1 to 128 printable characters", field="holder")
        if not 0 <= seconds <= MAX_LEASE:
            raise InvalidRequest(f"seconds: 0 to {MAX_LEASE}", field="seconds")
        self._catalog.lease(self._digest(reference), holder, time.time() + seconds)
        return await self.get(reference)

    def superseded(self, before: float) -> dict[str, str]:
        """See `Catalog.superseded`."""
        return self._catalog.superseded(before)

    def sweep(self) -> Names:
        """Remove what dead builds left."""
        return self._store.sweep()

    async def collect(self, *, dry_run: bool, min_age: float) -> GcResult:
        """Remove garbage, or say what would go."""
        return await gc.collect(self, dry_run=dry_run, min_age=min_age)

    async def verify(self, reference: str) -> LayerInfo:
        """Read the image file and compare its digest; a bad one is marked and refused from now on."""
        digest = self._digest(reference)
        blobs.ignore_lease_signal()
        try:
            await asyncio.to_thread(self._store.check, digest)
        except LayerInvalid as error:
            self._catalog.set_damaged(digest, error.message)
            raise
        if self._catalog.digests().get(digest, (0, None))[1] is not None:
            self._catalog.set_damaged(digest, None)
        return await self.get(digest)

    async def fsck(self) -> AsyncGenerator[Progress, None]:
        """Check every layer; drop image files that no catalog entry names. The result lists `ok`, `damaged` and `orphans_removed`."""
        known = self._catalog.digests()
        ok, damaged = [], {}
        for position, digest in enumerate(known):
            yield Progress(message=digest, fraction=position / max(1, len(known)))
            try:
                await self.verify(digest)
                ok.append(digest)
            except LayerInvalid as error:
                damaged[digest] = error.message
            except LayerNotFound:
                continue  # removed while this ran
        async with self._publishing:
            orphans = [digest for digest in self._store.files() if self._catalog.find(digest) is None and not self._young(digest)]
            for digest in orphans:
                self._store.remove(digest)
        yield Progress(
            message="done", fraction=1.0, result={"ok": ok, "damaged": damaged, "orphans_removed": orphans, "swept": self._store.sweep()}
        )

    def _young(self, digest: str) -> bool:
        """A file without an entry may be between its rename and its entry, in this process or another."""
        try:
            stat = self._store.layer(digest).path.stat()
        except FileNotFoundError:
            return True
        return stat.st_ctime > time.time() - 60

    # --------------------------------------------------------------------------------------------------------------------------- builds

    async def build(self, request: LayerRequest) -> AsyncGenerator[Progress, None]:
        """Build a layer; the last line's `result` is its LayerInfo.

        Raises InvalidRequest at once, later LayerInvalid, BuildFailed, NoSpace.
        """
        given = [name for name in ("debian", "directory", "tar") if getattr(request, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("give exactly one of debian, directory, tar", field="debian")
        if request.include and request.debian is None:
            raise InvalidRequest("include goes with debian only", field="include")
        total = None
        described = f"{given[0]} {getattr(request, given[0])}" + (f" include {','.join(request.include)}" if request.include else "")
        if request.directory is not None:
            path = _absolute(request.directory, "directory")
            if not path.is_dir():
                raise InvalidRequest(f"{path} is not a directory", field="directory")
        elif request.tar is not None:
            path = _absolute(request.tar, "tar")
            if not path.is_file():
                raise InvalidRequest(f"{path} is not a file", field="tar")
            total = path.stat().st_size if path.suffix == ".tar" else None
        elif request.prefix != "/":
            raise InvalidRequest("prefix goes with directory and tar only", field="prefix")

        def origin(work: Path) -> Source | Path:
            if request.debian is not None:
                return debian_source(request.debian, request.include, work, self.tools)
            return directory_source(path) if request.directory is not None else path

        async for line in self.make(request.name, request.kind, request.parents, request.prefix, described, origin, total):
            yield line

    async def import_tar(
        self, name: str, kind: str, stream: AsyncIterator[bytes], *, parents: Names | None = None, prefix: str = "/", source: str = "upload"
    ) -> AsyncGenerator[Progress, None]:
        """Build a layer from an uploaded archive, plain or compressed, at the pace of the upload."""
        async for line in self.make(name, kind, parents or [], prefix, source, lambda work: stream):
            yield line

    async def make(
        self,
        name: str,
        kind: str,
        parents: Names,
        prefix: str,
        source: str,
        origin: Callable[[Path], Origin],
        total: int | None = None,
        made_from: Callable[[dict[str, Any]], str] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Build a layer of what `origin` gives. `made_from` names the input, told what the build says of itself: the layer is remembered
        under it, and where the layer holds nothing at all none is made (the last line's result is empty)."""
        check_name(name)
        if kind not in KINDS:
            raise InvalidRequest(f"layer kind {kind!r}: one of {', '.join(KINDS)}", field="kind")
        try:
            clean(prefix.encode() or b"/", "prefix")
        except LayerInvalid as error:
            raise InvalidRequest(error.message, field="prefix") from None
        digests = [self._digest(parent, "parent layer") for parent in parents]
        if self._slots.locked():
            yield Progress(message="waiting for another build")
        async with self._slots:
            work = await asyncio.to_thread(self._store.open_workspace)
            try:
                build = Build(work.path, self.tools, self.caps, prefix)
                async with contextlib.aclosing(build.run(origin(work.path), total)) as lines:
                    async for line in lines:
                        yield line
                result = build.result
                if made_from is not None and result["entries"] <= 1:
                    yield Progress(message="an empty layer", fraction=1.0, result={})
                    return
                async with self._publishing:
                    await asyncio.to_thread(self._store.publish, build.image, result["digest"])
                    layer = await asyncio.to_thread(self._catalog.add, result["digest"], name, kind, result["size"], digests, source)
                    if made_from is not None:
                        await asyncio.to_thread(self._catalog.set_made_from, made_from(result), result["digest"])
            finally:
                await asyncio.shield(asyncio.to_thread(work.close))
        left_out = "".join(f"; left out: {count} {reason}" for reason, count in result["dropped"].items())
        yield Progress(
            message=f"{layer.digest} {result['entries']} entries, {layer.size >> 20} MiB{left_out}",
            fraction=1.0,
            result=_plain(layer) | {name: result[name] for name in ("report",) if name in result},
        )

    # --------------------------------------------------------------------------------------------------------------------- whole images

    def pull(self, request: ImagePull) -> AsyncGenerator[Progress, None]:
        """Bring an image from a registry; the last line's `result` is its EnvironmentInfo. docs/oci.md."""
        return whole.pull(self, request)

    def import_image(
        self, origin: Path | AsyncIterator[bytes], name: str | None = None, image: str | None = None, platform: str = "linux/amd64"
    ) -> AsyncGenerator[Progress, None]:
        """Make an environment of an OCI layout (a directory or a tar) or a `docker save` archive, of this node or uploaded.

        `image`: which one, where there are several.
        """
        return whole.load(self, origin, name, image, platform)

    def build_image(
        self, context: AsyncIterator[bytes], runner: Runner, name: str, *, dockerfile: str, target: str | None, args: dict[str, str]
    ) -> AsyncGenerator[Progress, None]:
        """Build a Dockerfile of a context, an uploaded tar; the last line's `result` is the EnvironmentInfo. docs/oci.md."""
        return whole.build(self, context, runner, name, dockerfile=dockerfile, target=target, args=args)

    # ------------------------------------------------------------------------------------------------------------- layers in a store

    async def prepare(self, image: ResolvedImage) -> None:
        """Called after `pin` and before the layers are mounted: data that is not on this node will be there when it is read."""
        await self.remote.prepare(image.layers)

    async def make_room(self, digest: str) -> bool:
        """Unmount a layer that nobody uses, so that its data can go. False: it is in use."""
        if self._pinned(digest):
            return False
        if self.on_remove is not None:
            await self.on_remove(digest)
        return not self._pinned(digest)

    def chain(self, reference: str) -> Names:
        """A layer and all below it, base first."""
        found: Names = []
        self._chain(self._digest(reference), found)
        return found

    @contextlib.asynccontextmanager
    async def workspace(self) -> AsyncIterator[Path]:
        """A directory for one piece of work; it goes with all that is in it."""
        work = await asyncio.to_thread(self._store.open_workspace)
        try:
            yield work.path
        finally:
            await asyncio.shield(asyncio.to_thread(work.close))

    async def adopt(self, digest: str, name: str, kind: str, size: int, parents: Names, source: str) -> LayerInfo:
        """Name a layer whose files are in their place."""
        async with self._publishing:
            return await asyncio.to_thread(self._catalog.add, digest, name, kind, size, parents, source)

    def push_layer(self, reference: str) -> AsyncGenerator[Progress, None]:
        """Push a layer and what is below it to the store."""
        return exchange.push(self, self.remote, reference)

    def pull_layer(self, reference: str, *, lazy: bool, name: str | None = None) -> AsyncGenerator[Progress, None]:
        """Pull a layer and what is below it from the store."""
        return exchange.pull(self, self.remote, reference, lazy=lazy, name=name)

    def push_environment(self, name: str) -> AsyncGenerator[Progress, None]:
        """Push an environment and its layers to the store."""
        return exchange.push_environment(self, self.remote, name)

    def pull_environment(self, reference: str, *, lazy: bool, name: str | None = None) -> AsyncGenerator[Progress, None]:
        """Pull an environment and its layers from the store."""
        return exchange.pull_environment(self, self.remote, reference, lazy=lazy, name=name)

    def check_pack(self, request: PackRequest) -> None:
        """Whether a diff can be packed as asked. InvalidRequest."""
        diffs.check(request)

    async def pack(self, origin: DiffOrigin, request: PackRequest) -> PackResult:
        """Make a layer and an environment of a copy of a writable layer."""
        return await diffs.pack(self, origin, request)

    async def squash(self, name: str, target: str | None) -> EnvironmentInfo:
        """Make one layer of the diffs on top of an environment."""
        return await diffs.squash(self, name, target)

    # --------------------------------------------------------------------------------------------------------------------- environments

    async def put_environment(self, name: str, spec: EnvironmentSpec) -> EnvironmentInfo:
        """Bind `name[:tag]` to layers (names become digests now), ENV, USER, WORKDIR."""
        base, tag = split_reference(name)
        if not spec.layers:
            raise InvalidRequest("an environment needs a layer", field="layers")
        if not spec.workdir.startswith("/") or "\0" in spec.workdir:
            raise InvalidRequest(f"workdir {spec.workdir!r} is not an absolute path", field="workdir")
        for key, value in spec.env.items():
            if not key or "=" in key or "\0" in key + value:
                raise InvalidRequest(f"environment variable {key!r} is not valid", field="env")
        digests = [self._digest(layer) for layer in spec.layers]
        self._refresh()
        self._resolved(name, digests)
        return self._catalog.put_environment(base, tag, msgspec.structs.replace(spec, layers=digests))

    def remember(self, source: str, digest: str) -> None:
        """A layer was made of this input."""
        self._catalog.set_made_from(source, digest)

    def made_from(self, source: str) -> str | None:
        """The layer that was made of this input before."""
        return self._catalog.made_from(source)

    def layer(self, digest: str) -> Layer:
        """The files of a layer that is known and not damaged."""
        self._refresh()
        return self._resolved(None, [digest]).layers[0]

    async def get_environment(self, name: str) -> EnvironmentInfo:
        """One environment; LayerNotFound when there is none."""
        found = self._catalog.environment(*split_reference(name))
        if found is None:
            raise LayerNotFound(f"no environment {name!r}", environment=name)
        return found

    def has_layer(self, reference: str) -> bool:
        """Whether this names a layer of the catalog."""
        return self._catalog.find(reference) is not None

    async def list_environments(self) -> Environments:
        """All, by name."""
        return self._catalog.environments()

    async def remove_environment(self, name: str) -> None:
        """Forget the name; layers stay, and sandboxes made from it go on."""
        if not self._catalog.remove_environment(*split_reference(name)):
            raise LayerNotFound(f"no environment {name!r}", environment=name)


def _holder(pin: str) -> str:
    """What holds layers under this name: snapshots and copies that a fork is made of do, beside sandboxes."""
    return "snapshot" if pin.startswith("snap-") else "fork" if "." in pin else "sandbox"


def _absolute(path: str, field: str) -> Path:
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{path!r} is not an absolute path on the node", field=field)
    return Path(path)


def _plain(layer: LayerInfo) -> dict[str, Any]:
    value = msgspec.to_builtins(layer)
    assert isinstance(value, dict)
    return value


async def last(lines: AsyncIterator[Progress], report: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Run a long operation to its end and return its result."""
    result: dict[str, Any] | None = None
    async for line in lines:
        if report is not None:
            report(line)
        result = line.result if line.result is not None else result
    if result is None:
        raise BuildFailed("the operation ended without a result")
    return result
