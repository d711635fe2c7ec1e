"""Where layers are kept for all nodes: a directory (any mounted file system), or any S3-compatible service. One small interface.

    chunks/<ab>/<sha256>    bytes of data blobs
    meta/<sha256>           metadata images
    layers/<sha256>         descriptors
    refs/<name>             digest that a name stands for: of the newest push
    traces/<key>            order of first reads of an environment

An object appears whole or not at all. All but refs and traces are named by their content: whoever writes one twice writes the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from dsec.linux.files import sync_directory
from libdsec.errors import InvalidRequest, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import S3Config

OPTIONS = ("endpoint", "region")
T = TypeVar("T")


class Missing(Exception):
    """There is no such object."""


class Store(Protocol):
    """Objects by key. StoreUnavailable when the store does not answer or refuses; it may answer later."""

    url: str

    async def get(self, key: str) -> bytes:
        """The whole object; Missing."""
        ...

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """At most `length` bytes of it; Missing."""
        ...

    async def put(self, key: str, data: bytes | memoryview, *, replace: bool = False) -> bool:
        """Write it if it is absent (`replace`: in any case). False: it was there."""
        ...

    async def exists(self, key: str) -> bool:
        """Whether it is there."""
        ...

    async def list(self, prefix: str) -> Sequence[str]:
        """Keys below a prefix that ends in `/`."""
        ...

    async def delete(self, key: str) -> None:
        """Remove it; no error when it is not there."""
        ...


def open_store(url: str) -> Store:
    """`/a/directory`, `file:///a/directory` or `s3://bucket/prefix[?endpoint=http://host:port&region=...]` (credentials: AWS_*)."""
    if url.startswith("/"):
        return DirectoryStore(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return DirectoryStore(Path(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        options = dict(parse_qsl(parts.query))
        if unknown := set(options) - set(OPTIONS):
            text = f"store {url}: unknown option {sorted(unknown)[0]!r}; there are {', '.join(OPTIONS)}"
            raise InvalidRequest(text, field="remote.store")
        return S3Store(url, parts.netloc, parts.path.strip("/"), options)
    raise InvalidRequest(f"store {url!r} is neither a directory nor s3://bucket/prefix", field="remote.store")


class DirectoryStore:
    """Files below one directory. Two writers of one object each write a file of their own; the first to link it wins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    async def get(self, key: str) -> bytes:
        return await self._run(lambda path: path.read_bytes(), key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        def read(path: Path) -> bytes:
            with path.open("rb") as file:
                return os.pread(file.fileno(), length, offset)

        return await self._run(read, key)

    async def exists(self, key: str) -> bool:
        return await self._run(lambda path: path.exists(), key)

    async def delete(self, key: str) -> None:
        await self._run(lambda path: path.unlink(missing_ok=True), key)

    async def list(self, prefix: str) -> Sequence[str]:
        def walk(path: Path) -> Sequence[str]:
            return sorted(str(p.relative_to(self.root)) for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))

        return await self._run(walk, prefix)

    async def put(self, key: str, data: bytes | memoryview, *, replace: bool = False) -> bool:
        return await self._run(lambda path: _publish(path, data, replace), key)

    async def _run(self, work: Callable[[Path], T], key: str) -> T:
        path = self.root / key
        try:
            return await asyncio.to_thread(work, path)
        except (FileNotFoundError, NotADirectoryError):
            if self.root.is_dir():
                raise Missing(key) from None
            raise StoreUnavailable(f"store {self.url} is not there", store=self.url) from None
        except OSError as error:
            raise StoreUnavailable(f"store {self.url}: {key}: {error.strerror}", store=self.url) from error


def _publish(path: Path, data: bytes | memoryview, replace: bool) -> bool:
    if not replace and path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=".put-", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644 if replace else 0o444)
        if replace:
            os.replace(name, path)
        else:
            try:
                os.link(name, path)
            except FileExistsError:
                return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    sync_directory(path.parent)
    return True


class S3Store:
    """Any service that speaks S3. A put is atomic there; what is there already is asked for first, so a second push sends nothing again."""

    def __init__(self, url: str, bucket: str, prefix: str, options: dict[str, str]) -> None:
        import obstore  # the object store library costs 60 ms to import, and a directory needs none of it
        from obstore.store import S3Store as Remote

        self.url = url
        self._api = obstore
        endpoint = options.get("endpoint")
        config: S3Config = {"region": options.get("region") or os.environ.get("AWS_REGION") or "us-east-1"}
        if endpoint:
            config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        self._store = Remote(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options={"allow_http": bool(endpoint and endpoint.startswith("http://")), "timeout": "20s", "connect_timeout": "5s"},
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=5)},
        )

    async def get(self, key: str) -> bytes:
        async def read() -> bytes:
            return bytes(await (await self._api.get_async(self._store, key)).bytes_async())

        return await self._try(read(), key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        async def read() -> bytes:
            return bytes(await self._api.get_range_async(self._store, key, start=offset, length=length))

        return await self._try(read(), key)

    async def exists(self, key: str) -> bool:
        async def head() -> bool:
            await self._api.head_async(self._store, key)
            return True

        try:
            return await self._try(head(), key)
        except Missing:
            return False

    async def delete(self, key: str) -> None:
        async def remove() -> None:
            await self._api.delete_async(self._store, key)

        with contextlib.suppress(Missing):
            await self._try(remove(), key)

    async def list(self, prefix: str) -> Sequence[str]:
        async def walk() -> Sequence[str]:
            return sorted([str(entry["path"]) async for page in self._api.list(self._store, prefix) for entry in page])

        return await self._try(walk(), prefix)

    async def put(self, key: str, data: bytes | memoryview, *, replace: bool = False) -> bool:
        if not replace and await self.exists(key):
            return False

        async def write() -> bool:
            await self._api.put_async(self._store, key, bytes(data), use_multipart=False)
            return True

        return await self._try(write(), key)

    async def _try(self, work: Awaitable[T], key: str) -> T:
        try:
            return await work
        except FileNotFoundError:
            raise Missing(key) from None
        except self._api.exceptions.NotFoundError:
            raise Missing(key) from None
        except (self._api.exceptions.BaseError, OSError) as error:
            raise StoreUnavailable(f"store {self.url}: {key}: {_first_line(error)}", store=self.url) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
