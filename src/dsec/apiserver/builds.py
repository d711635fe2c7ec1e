"""RUN steps of a build in sandboxes of this node: a fresh sandbox for each, stopped when its changes are packed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from dsec.edge.streams import Output
from dsec.images.dockerfile.builder import Command
from libdsec.errors import BuildFailed, DSecError, LayerInUse, LayerNotFound
from libdsec.wire import Ending, ExecResult, ExecSpec, PackRequest, Progress, SandboxSpec

if TYPE_CHECKING:
    from dsec.edge.edge import Edge
    from dsec.images.service import Images

KEPT = 4000  # bytes of output that a failure shows
IDLE = 900.0  # seconds
LINE = 2000  # bytes of one line of progress


class EdgeRunner:
    """See `dsec.images.dockerfile.builder.Runner`."""

    def __init__(self, edge: Edge, images: Images) -> None:
        self._edge, self._images = edge, images

    async def run(self, command: Command) -> AsyncGenerator[Progress, None]:
        """Run, pack, stop. BuildFailed for any ending but exit code 0."""
        # the sandbox of a node that died over a build must not stay for good
        spec = SandboxSpec(layers=command.layers, user="root", workdir="/", labels={"dsec.build": command.name}, idle_timeout=IDLE)
        info = await self._edge.create(spec)
        try:
            exec_spec = ExecSpec(argv=command.argv, env=command.env, user=command.user, cwd=command.workdir, merge=True)
            result: ExecResult | None = None
            rest, kept = b"", b""
            async with contextlib.aclosing(self._edge.stream(info.id, exec_spec)) as items:  # type: ignore[type-var]
                async for item in items:
                    if isinstance(item, Output):
                        kept = (kept + item.data)[-KEPT:]
                        *lines, rest = (rest + item.data).split(b"\n")
                        for line in (*lines, *([rest] if len(rest) > LINE else [])):
                            yield Progress(message="  " + line[:LINE].decode(errors="replace"))
                        rest = b"" if len(rest) > LINE else rest
                    elif item.event == "end":
                        result = item.result
            if rest:
                yield Progress(message="  " + rest.decode(errors="replace"))
            if result is None or result.ending is not Ending.EXITED or result.exit_code != 0:
                raise BuildFailed(f"the command {_ended(result)}", output=kept.decode(errors="replace"))
            packed = await self._edge.pack_diff(info.id, PackRequest(name=command.name, tag="step", scrub=[]))
            with contextlib.suppress(LayerNotFound):  # an equal step of another build removed it
                await self._images.remove_environment(f"{command.name}:step")
            digest = packed.layer.digest
            if not packed.report.entries and not packed.report.whiteouts:  # nothing changed: once more the layer that is on top
                digest = command.layers[-1]
                with contextlib.suppress(LayerInUse, LayerNotFound):
                    await self._images.remove(command.name)
            yield Progress(message=f"  {packed.report.entries} entries changed", result={"digest": digest})
        finally:
            with contextlib.suppress(DSecError):  # it may have ended by itself
                await asyncio.shield(self._edge.stop(info.id))


def _ended(result: ExecResult | None) -> str:
    if result is None:
        return "has no end"
    if result.ending is Ending.EXITED:
        return f"exited with {result.exit_code}"
    return f"ended: {result.ending.value}" + (f" (signal {result.signal})" if result.signal else "")
