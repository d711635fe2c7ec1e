"""Function calls from the client's side: their arguments, and the stream of a batch's results."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from libdsec.api import SEND_MSGPACK, Api, encode
from libdsec.errors import ConnectionFailed, InvalidRequest, StreamLost, from_body
from libdsec.fncall import FRAME_RESULT, FnBatch, FnCall, FnKind, FnLimits, FnResult, GpuRequest, JudgeSpec
from libdsec.stream import SILENCE, Frames
from libdsec.wire import FRAME_EVENT, FRAME_KEEPALIVE, StreamEvent

Calls = Sequence["FnCallArgs"]
_event = msgspec.json.Decoder(StreamEvent).decode
_result = msgspec.msgpack.Decoder(FnResult).decode


@dataclasses.dataclass(kw_only=True, slots=True)
class FnCallArgs:
    """One function call. None: the node's default. docs/fncall.md says what each kind does with what.

    `kind`: python (`code`, or its function `entry` called with `args` and `kwargs`), shell (`code`), compile_run (`code` of a `language`),
    judge (`code` judged as `judge` says), custom (the program `argv`).
    """

    image: str
    kind: FnKind | str = FnKind.PYTHON
    code: str | None = None
    entry: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    argv: Sequence[str] = ()
    language: str | None = None
    files: Mapping[str, bytes | str] = dataclasses.field(default_factory=dict)  # by name below /box, where the call begins
    executable: Sequence[str] = ()
    collect: Sequence[str] = ()  # files that the result shall have
    stdin: bytes | str = b""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: FnLimits | None = None
    preload: Sequence[str] | None = None  # modules that a python call finds imported; each set of them is an interpreter of its own
    stop_at_output: bool = False  # end it at its output limit, instead of dropping what is more
    judge: JudgeSpec | None = None
    gpu: GpuRequest | None = None
    key: str | None = None  # of idempotency

    def call(self) -> FnCall:
        """The wire form."""
        try:
            kind = FnKind(self.kind)
        except ValueError:
            raise InvalidRequest(f"kind is {self.kind!r}, must be one of {', '.join(FnKind)}", field="kind") from None
        return FnCall(
            image=self.image,
            kind=kind,
            code=self.code,
            entry=self.entry,
            args=list(self.args),
            kwargs=dict(self.kwargs),
            argv=list(self.argv),
            language=self.language,
            files={name: _bytes(content) for name, content in self.files.items()},
            executable=list(self.executable),
            collect=list(self.collect),
            stdin=_bytes(self.stdin),
            env=dict(self.env),
            limits=self.limits or FnLimits(),
            preload=None if self.preload is None else list(self.preload),
            stop_at_output=self.stop_at_output,
            judge=self.judge,
            gpu=self.gpu,
            key=self.key,
        )


async def results(api: Api, calls: Calls) -> AsyncIterator[FnResult]:
    """Results as they come. StreamLost when the connection breaks before the last one; the node ends what it was at then."""
    body = encode(FnBatch(calls=[call.call() for call in calls]))
    response = await api.open("POST", "/v1/fncalls:batch", body=body, headers=SEND_MSGPACK, safe=True, timeout=None, idle_timeout=SILENCE)
    frames = Frames(response)
    try:
        while True:
            try:
                frame = await frames.next()
            except ConnectionFailed as error:
                raise StreamLost(f"the results of the batch broke off: {error.message}") from error
            if frame is None:
                raise StreamLost("the results of the batch broke off")
            kind, data = frame
            if kind == FRAME_RESULT:
                yield _result(data)
            elif kind == FRAME_EVENT:
                event = _event(data)
                if event.error is not None:
                    raise from_body(event.error.code, event.error.message, event.error.details)
                return
            elif kind != FRAME_KEEPALIVE:
                raise StreamLost(f"the results of the batch have a frame of kind {kind}")
    finally:
        await response.aclose()


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content
