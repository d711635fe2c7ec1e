"""Keys and tokens, all derived from the node's API key: nothing is stored, and a restarted face knows them again.

None of them tells anything of the node's key or of another sandbox's token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

from dsec.faces.e2b.http import whole

_ID_LENGTH = 20


class Keys:
    """What clients of one face present. `secret`: the node's API key."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.api_key = "e2b_" + self._derive("api key")[:40]  # two client versions insist on this form
        self._accepted = [key.encode() for key in (self.api_key, secret)]

    def _derive(self, what: str) -> str:
        return hmac.new(self._secret, b"dsec e2b " + what.encode(), hashlib.sha256).hexdigest()

    def is_api_key(self, given: str) -> bool:
        """The face's own key, or the node's."""
        shown = given.encode("latin-1", "replace")
        return any([hmac.compare_digest(shown, key) for key in self._accepted])

    def token(self, sandbox_id: str) -> str:
        """The access token of a sandbox. It begins with the id: handles of old clients present nothing else."""
        return f"{sandbox_id}{self._derive('sandbox ' + sandbox_id)[:40]}"

    def sandbox_of(self, token: str) -> str | None:
        """The sandbox that a token is for; None when it is no token of ours."""
        sandbox_id = token[:_ID_LENGTH]
        return sandbox_id if self.is_token(sandbox_id, token) else None

    def is_token(self, sandbox_id: str, token: str) -> bool:
        """Whether it opens this sandbox."""
        return hmac.compare_digest(token.encode("latin-1", "replace"), self.token(sandbox_id).encode("latin-1", "replace"))

    def traffic_token(self, sandbox_id: str) -> str:
        """What opens the ports of a sandbox that asks for it."""
        return self._derive("traffic " + sandbox_id)[:40]

    def is_traffic_token(self, sandbox_id: str, token: str) -> bool:
        """Whether it opens the ports of this sandbox."""
        return hmac.compare_digest(token.encode("latin-1", "replace"), self.traffic_token(sandbox_id).encode())

    def upload_token(self, files: str) -> str:
        """What permits one upload."""
        return self._derive("upload " + files)[:40]

    def is_upload_token(self, files: str, token: str) -> bool:
        """Whether it permits this upload."""
        return hmac.compare_digest(token.encode("latin-1", "replace"), self.upload_token(files).encode())

    def is_signature(self, sandbox_id: str, given: str, path: str, operation: str, user: str, expires: str | None) -> bool:
        """Whether it signs one operation ("read" or "write") on a file of this sandbox. That it has not expired is not looked at here."""
        text = f"{path}:{operation}:{user}:{self.token(sandbox_id)}" + (f":{expires}" if expires is not None else "")
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()).rstrip(b"=")
        return hmac.compare_digest(given.encode("latin-1", "replace"), b"v1_" + digest)


def has_expired(expires: str | None) -> bool:
    """`signature_expiration`: Unix seconds. What is no such number has."""
    return expires is not None and (whole(expires) or 0) < time.time()
