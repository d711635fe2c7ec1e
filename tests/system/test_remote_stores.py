"""Stores of layers: a directory, and a service that speaks S3 (moto, on loopback)."""
from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import pytest

from dsec.images.remote.stores import DirectoryStore, Missing, Store, open_store
from libdsec.errors import InvalidRequest, StoreUnavailable

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class S3:
    """A server process."""

    def __init__(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"s3://layers/some/prefix?endpoint={self.endpoint}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 30
        while True:
            try:
                httpx.get(self.endpoint, timeout=2)
                break
            except httpx.TransportError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.1)
        self.client = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")
        self.client.create_bucket(Bucket="layers")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    before = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(KEYS)
    server = S3()
    yield server
    server.close()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return open_store(f"file://{tmp_path}")
    return open_store(request.getfixturevalue("s3").url + "&region=us-east-1")


async def test_objects(store: Store) -> None:
    key = f"chunks/ab/{time.time_ns()}"
    assert not await store.exists(key)
    with pytest.raises(Missing):
        await store.get(key)
    with pytest.raises(Missing):
        await store.get_range(key, 0, 1)
    content = bytes(range(256)) * 4096
    assert await store.put(key, content)
    assert not await store.put(key, b"another")
    assert await store.get(key) == content and await store.exists(key)
    assert await store.get_range(key, 255, 3) == b"\xff\x00\x01"
    assert await store.put(key, b"another", replace=True) and await store.get(key) == b"another"
    assert await store.put(f"{key}-b", memoryview(b"xyz"))
    assert [k for k in await store.list("chunks/ab/") if k.startswith(key)] == [key, f"{key}-b"]
    for _ in range(2):
        await store.delete(key)
    assert not await store.exists(key)


async def test_many_writers_of_one_object(store: Store) -> None:
    key, content = f"chunks/cd/{time.time_ns()}", os.urandom(300_000)
    results = await asyncio.gather(*(store.put(key, content) for _ in range(12)))
    assert any(results) and await store.get(key) == content
    assert list(await store.list("chunks/cd/")) == [key]


async def test_a_store_that_is_not_there(tmp_path: Path, s3: S3) -> None:
    for gone in (DirectoryStore(tmp_path / "none"), open_store("s3://layers/x?endpoint=http://127.0.0.1:9")):
        with pytest.raises(StoreUnavailable) as error:
            await gone.get("chunks/ab/x")
        assert error.value.retryable
    with pytest.raises((StoreUnavailable, Missing)):
        await open_store(f"s3://no-such-bucket/x?endpoint={s3.endpoint}").get("chunks/ab/x")


@pytest.mark.parametrize("url", ["", "relative", "ftp://host/x", "s3:///x", "s3://bucket/x?endpont=http://x", "file://host/x"])
def test_urls_that_name_no_store(url: str) -> None:
    with pytest.raises(InvalidRequest):
        open_store(url)
