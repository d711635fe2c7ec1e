"""Images from a registry: the distribution API v2 over httpx. https://distribution.github.io/distribution/spec/api/

Every byte is checked against its digest while it comes; a broken transfer goes on where it stopped. Credentials go to the registry and to
the token service that it names, over TLS where the registry has TLS, and never to where a blob is redirected to.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from dsec.images.oci import spec
from dsec.images.oci.reference import Reference
from dsec.images.oci.source import BlobFile, Image, Layer, OnBytes
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid, LayerNotFound, NoSpace

ACCEPT = ", ".join((*spec.MANIFESTS, *spec.INDEXES))
ATTEMPTS = 5
PAUSE = 0.5  # seconds before the second attempt; doubles
REDIRECTS = 5
CHUNK = 1 << 20
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
LONGEST_WAIT = 20.0  # seconds between two attempts
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')
T = TypeVar("T")


class _Token(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None


class _Retry(Exception):
    """The attempt failed in a way that another one may not. `after`: seconds the server asks for."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Registry:
    """One image's registry. `aclose` at the end. `plain_http`: no TLS; a registry on this machine is spoken to without it anyway."""

    def __init__(
        self,
        reference: Reference,
        username: str | None = None,
        password: str | None = None,
        *,
        plain_http: bool = False,
    ) -> None:
        if (username is None) != (password is None):
            raise InvalidRequest("a user name needs a password, and a password a user name", field="password")
        self.reference = reference
        self._scheme = "http" if plain_http or _is_loopback(reference.host) else "https"
        self._base = f"{self._scheme}://{reference.host}/v2/{reference.repository}"
        self._basic = None
        if username is not None:
            self._basic = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        self._authorization: str | None = None
        self._signing_in = asyncio.Lock()
        self._client = httpx.AsyncClient(  # a registry on this machine is not behind a proxy
            timeout=TIMEOUT, headers={"user-agent": "dsec"}, follow_redirects=False, trust_env=not _is_loopback(reference.host)
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    # documents

    async def image(self, platform: spec.Platform) -> Image:
        """See Source."""
        selector = self.reference.selector
        for _ in range(3):  # an index may name an index
            what = f"manifest {selector} of {self.reference.registry}/{self.reference.repository}"
            data, kind = await self._document(f"{self._base}/manifests/{selector}", what, {"accept": ACCEPT})
            if spec.DIGEST.fullmatch(selector):
                spec.check_bytes(data, selector, what)
            document = spec.read_manifest(data, kind, what)
            if isinstance(document, spec.Manifest):
                return await self._image(document, selector if spec.DIGEST.fullmatch(selector) else spec.digest_of(data))
            selector = spec.choose(document, platform, what).digest
        raise LayerInvalid(f"{self.reference}: the indexes are nested too deep")

    async def _image(self, manifest: spec.Manifest, digest: str) -> Image:
        what = f"config {manifest.config.digest} of {self.reference}"
        data, _ = await self._document(f"{self._base}/blobs/{manifest.config.digest}", what, {})
        spec.check_bytes(data, manifest.config.digest, what)
        config = spec.read_config(data, len(manifest.layers), what)
        layers = [Layer(diff, one.size, self._fetch(one)) for diff, one in zip(config.rootfs.diff_ids, manifest.layers, strict=True)]
        return Image(str(self.reference), digest, config, layers)

    async def _document(self, url: str, what: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
        async def get() -> tuple[bytes, str]:
            async with self._get(url, what, headers) as response:
                data = bytearray()
                async for part in response.aiter_raw(CHUNK):
                    data += part
                    if len(data) > spec.DOCUMENT_MAX:
                        raise LayerInvalid(f"{what} has more than {spec.DOCUMENT_MAX} bytes")
                return bytes(data), response.headers.get("content-type", "").partition(";")[0].strip().lower()

        return await self._again(get, what)

    # blobs

    def _fetch(self, one: spec.Descriptor) -> Callable[[Path, OnBytes], Awaitable[BlobFile]]:
        async def fetch(directory: Path, on_bytes: OnBytes) -> BlobFile:
            path = directory / one.digest.partition(":")[2]
            with path.open("wb", buffering=0) as file:
                await self._download(one, file.fileno(), on_bytes)
            return BlobFile(path, 0, one.size, None)

        return fetch

    async def _download(self, one: spec.Descriptor, fd: int, on_bytes: OnBytes) -> None:
        what = f"blob {one.digest} of {self.reference}"
        algorithm, _, want = one.digest.partition(":")
        digest, done = hashlib.new(algorithm), 0

        async def part() -> None:
            nonlocal digest, done
            headers = {"range": f"bytes={done}-"} if done else {}
            async with self._get(f"{self._base}/blobs/{one.digest}", what, headers) as response:
                if done and not (response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {done}-")):
                    on_bytes(-done)  # no ranges here: from the beginning
                    digest, done = hashlib.new(algorithm), 0
                async for data in response.aiter_raw():  # as it comes: what came before a break counts
                    if done + len(data) > one.size:
                        raise LayerInvalid(f"{what} has more than the {one.size} bytes that its manifest says")
                    try:
                        await asyncio.to_thread(_write, fd, data, done)
                    except OSError as error:
                        raise NoSpace(f"{what} cannot be kept: {error.strerror}") from None
                    digest.update(data)
                    done += len(data)
                    on_bytes(len(data))
            if done < one.size:
                raise _Retry(f"it ended after {done} of {one.size} bytes")

        if one.size:
            await self._again(part, what)
        if digest.hexdigest() != want:
            raise LayerInvalid(f"{what} has the digest {algorithm}:{digest.hexdigest()}")
        await asyncio.to_thread(os.ftruncate, fd, one.size)

    # requests

    async def _again(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        """Try, wait and try again while the fault may pass."""
        for number in range(1, ATTEMPTS + 1):
            after = None
            try:
                return await attempt()
            except _Retry as error:
                failed, after = str(error), error.after
            except (httpx.TransportError, httpx.StreamError) as error:
                failed = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if number < ATTEMPTS:
                await asyncio.sleep(min(LONGEST_WAIT, after if after is not None else PAUSE * 2**number * random.uniform(0.5, 1)))
        raise BuildFailed(f"{what} could not be brought in {ATTEMPTS} attempts: {failed}", reference=str(self.reference))

    @contextlib.asynccontextmanager
    async def _get(self, url: str, what: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """An answer with content. Signs in when asked to, follows redirects without the credentials, raises what another status means."""
        home = httpx.URL(url)
        at, signed, redirects = home, False, 0
        while True:
            own = (at.scheme, at.host, at.port) == (home.scheme, home.host, home.port)
            known = self._authorization
            sent = {**headers, "accept-encoding": "identity", **({"authorization": known} if own and known else {})}
            async with self._client.stream("GET", at, headers=sent) as response:
                status = response.status_code
                if status in (200, 206):
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise LayerInvalid(f"{what} comes with the content encoding {response.headers['content-encoding'][:50]!r}")
                    yield response
                    return
                if status == 401 and own and not signed:
                    signed = True
                    await self._sign_in(response, what, known)
                    continue
                if status in (301, 302, 303, 307, 308) and "location" in response.headers:
                    redirects += 1
                    at = self._redirect(at, response.headers["location"], what)
                    if redirects > REDIRECTS:
                        raise BuildFailed(f"{what}: more than {REDIRECTS} redirects")
                    continue
                raise await self._refusal(response, what)

    def _redirect(self, at: httpx.URL, location: str, what: str) -> httpx.URL:
        try:
            target = at.join(location)
        except httpx.InvalidURL:
            raise BuildFailed(f"{what}: the registry redirects to {location[:200]!r}") from None
        if target.scheme not in ("http", "https") or (at.scheme == "https" and target.scheme != "https"):
            raise BuildFailed(f"{what}: the registry redirects from {at.scheme} to {target.scheme[:20]!r}")
        return target

    async def _refusal(self, response: httpx.Response, what: str) -> Exception:
        text = ""
        with contextlib.suppress(httpx.HTTPError):
            async for part in response.aiter_text():
                text += part
                if len(text) > 2000:
                    break
        status = response.status_code
        told = " ".join(text.split())[:300]
        if status in AGAIN:
            return _Retry(f"status {status} {told}", _seconds(response.headers.get("retry-after")))
        if status == 404:
            return LayerNotFound(f"{what} is not in the registry {told}", reference=str(self.reference))
        if status in (401, 403):
            how = "with these credentials" if self._basic else "without credentials"
            return BuildFailed(f"{what}: the registry refuses it {how} (status {status}) {told}", reference=str(self.reference))
        return BuildFailed(f"{what}: the registry answers with status {status} {told}", reference=str(self.reference))

    # credentials

    async def _sign_in(self, response: httpx.Response, what: str, known: str | None) -> None:
        """Answer a challenge: a token of the service it names, or the credentials themselves."""
        challenge = response.headers.get("www-authenticate", "")
        async with self._signing_in:
            if self._authorization != known:
                return  # another request of ours did it just now
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                self._authorization = "Bearer " + await self._token(dict(_CHALLENGE.findall(rest)), what)
            elif scheme.lower() == "basic":
                if self._basic is None:
                    raise BuildFailed(f"{what}: the registry wants a user name and a password", reference=str(self.reference))
                self._authorization = self._basic
            else:
                raise BuildFailed(f"{what}: the registry wants {scheme[:40]!r}, which is no way to sign in here")

    async def _token(self, challenge: dict[str, str], what: str) -> str:
        try:
            realm = httpx.URL(challenge.get("realm", ""))
        except httpx.InvalidURL:
            realm = httpx.URL("")
        if realm.scheme not in (("https",) if self._scheme == "https" else ("http", "https")) or not realm.host:
            raise BuildFailed(f"{what}: the registry's token service is at {str(realm)[:200]!r}, where no credentials are sent")
        query = {"scope": f"repository:{self.reference.repository}:pull"}
        if "service" in challenge:
            query["service"] = challenge["service"]
        headers = {"authorization": self._basic} if self._basic else {}

        async def ask() -> str:
            answer = await self._client.get(realm.copy_merge_params(query), headers=headers)
            if answer.status_code in AGAIN:
                raise _Retry(f"the token service answers with status {answer.status_code}", _seconds(answer.headers.get("retry-after")))
            if answer.status_code != 200:
                raise BuildFailed(f"{what}: the token service answers with status {answer.status_code}", reference=str(self.reference))
            found = spec.decode(answer.content, _Token, f"the token for {self.reference}")
            token = found.token or found.access_token
            if not token or not token.isascii() or not token.isprintable():
                raise BuildFailed(f"{what}: the token service gave no token", reference=str(self.reference))
            return token

        return await self._again(ask, f"a token for {self.reference}")


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"\d{1,5}", text) else None


def _is_loopback(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
