"""Secrets of one node: a file each in STATE/secrets, mode 0600. Their values are in no log, journal or reply, nor in any object's text."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec

from dsec.linux.files import write_whole
from libdsec.errors import InvalidRequest, NotFound
from libdsec.secrets import SecretInfo, SecretSpec, SecretUse

MOST = 64 << 10  # bytes of one
MOST_IN_SANDBOX = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_REFUSED = ("host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization", "expect")


class Secret(msgspec.Struct, kw_only=True, frozen=True):
    """One of them. It never shows its value by itself."""

    name: str
    value: bytes
    hosts: tuple[str, ...]
    header: str
    template: str
    plain: bool
    set_at: float

    def __repr__(self) -> str:
        return f"<Secret {self.name}>"

    @property
    def line(self) -> str:
        """The header's value. ValueError when the secret is not text that a header can carry."""
        return self.template.replace("{}", self.value.decode("ascii").strip("\r\n"))

    def info(self) -> SecretInfo:
        """What may be known of it."""
        return SecretInfo(
            name=self.name, hosts=list(self.hosts), header=self.header, template=self.template, plain=self.plain, size=len(self.value),
            set_at=self.set_at,
        )  # fmt: skip


_decode = msgspec.json.Decoder(Secret).decode


Uses = list[SecretUse]


class Secrets:
    """The store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, spec: SecretSpec) -> SecretInfo:
        """Set a secret, in the place of one of this name. Sandboxes that have it as a file keep what they have. InvalidRequest."""
        _check(name, spec)
        hosts = tuple(host.lower() for host in spec.hosts)
        secret = Secret(
            name=name, value=spec.value, hosts=hosts, header=spec.header, template=spec.template, plain=spec.plain, set_at=time.time()
        )  # fmt: skip
        if hosts:
            _check_line(secret)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._directory / f"{name}.json", msgspec.json.encode(secret), sync=True)
        return secret.info()

    def get(self, name: str) -> Secret:
        """NotFound."""
        try:
            if _NAME.fullmatch(name):
                return _decode((self._directory / f"{name}.json").read_bytes())
        except FileNotFoundError:
            pass
        raise NotFound(f"no secret is named {name[:80]!r}", secret=name[:80])

    def list(self) -> list[SecretInfo]:
        """All of them, by name."""
        return [self.get(path.stem).info() for path in sorted(self._directory.glob("*.json"))]

    def remove(self, name: str) -> SecretInfo:
        """Forget it. NotFound."""
        info = self.get(name).info()
        (self._directory / f"{name}.json").unlink(missing_ok=True)
        return info

    def check(self, uses: Uses) -> None:
        """Whether a sandbox can have these. InvalidRequest, NotFound."""
        if len(uses) > MOST_IN_SANDBOX:
            raise InvalidRequest(f"{len(uses)} secrets, at most {MOST_IN_SANDBOX} are allowed", field="secrets")
        if len({use.name for use in uses}) != len(uses):
            raise InvalidRequest("a secret is named twice", field="secrets")
        for use in uses:
            secret = self.get(use.name)
            if use.file == use.inject:
                raise InvalidRequest(f"secret {use.name}: either as a file or injected", field="secrets")
            if use.inject and not secret.hosts:
                raise InvalidRequest(f"secret {use.name} has no hosts to be injected for", field="secrets")
            if not 0 <= use.mode <= 0o777 or not 0 <= use.uid <= 65535 or not 0 <= use.gid <= 65535:
                raise InvalidRequest(f"secret {use.name}: the mode is 0 to 0777, uid and gid are 0 to 65535", field="secrets")
        if sum(len(self.get(use.name).value) for use in uses if use.file) > 8 * MOST:
            raise InvalidRequest(f"the files of secrets are more than {8 * MOST} bytes together", field="secrets")


def _check(name: str, spec: SecretSpec) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"a secret's name must match {_NAME.pattern}", field="name")
    if not 0 < len(spec.value) <= MOST:
        raise InvalidRequest(f"a secret has 1 to {MOST} bytes, this has {len(spec.value)}", field="value")
    for host in spec.hosts:
        if not _HOST.fullmatch(host):
            raise InvalidRequest(f"host {host[:80]!r} is not a name or name:port", field="hosts")
    if not _HEADER.fullmatch(spec.header) or spec.header.lower() in _REFUSED:
        raise InvalidRequest(f"header {spec.header[:80]!r} cannot carry a secret", field="header")
    if "{}" not in spec.template or len(spec.template) > 200 or not spec.template.isascii() or not spec.template.isprintable():
        raise InvalidRequest("the template is a line of text in which {} stands for the secret", field="template")


def _check_line(secret: Secret) -> None:
    try:
        line = secret.line
    except UnicodeDecodeError:
        line = "\n"
    if not line.isprintable():
        raise InvalidRequest("a secret for requests must be one line of ASCII text", field="value")
