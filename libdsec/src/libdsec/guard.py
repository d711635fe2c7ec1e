"""Secrets of a node, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from libdsec.api import path
from libdsec.secrets import SecretInfo, SecretSpec

if TYPE_CHECKING:
    from libdsec.api import Api

SecretInfos = list[SecretInfo]
_secrets = msgspec.msgpack.Decoder(list[SecretInfo]).decode


class Secrets:
    """Values that the node keeps by name and gives to sandboxes; nobody can read them back."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def set(
        self,
        name: str,
        value: str | bytes,
        *,
        hosts: Sequence[str] = (),
        header: str = "Authorization",
        template: str = "Bearer {}",
        plain: bool = False,
    ) -> SecretInfo:
        """Set a secret, in the place of one of this name.

        `hosts`: names, or `name:port`, to which sandboxes that have it injected may send requests that carry it, as the header `header`
        with the value `template`, in which `{}` stands for the secret. `plain`: the node speaks HTTP to them, not HTTPS.
        """
        data = value.encode() if isinstance(value, str) else value
        body = SecretSpec(value=data, hosts=list(hosts), header=header, template=template, plain=plain)
        return await self._api.call("PUT", path("secrets", name), SecretInfo, body=body, safe=True)

    async def list(self) -> SecretInfos:
        """All of them, without their values."""
        return _secrets((await self._api.exchange("GET", "/v1/secrets"))[1])

    async def remove(self, name: str) -> SecretInfo:
        """Forget it. Sandboxes that have it as a file keep the file; requests do not carry it any more. NotFound."""
        return await self._api.call("DELETE", path("secrets", name), SecretInfo)
