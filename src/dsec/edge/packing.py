"""pack_diff: the writable layer of a running sandbox becomes a layer, without stopping it."""
from __future__ import annotations

import asyncio

from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.core import Core
from dsec.edge.lifecycle import SLOT_SIZE, random_text
from dsec.images.model import DiffOrigin
from libdsec.wire import PackRequest, PackResult


class Packing(Core):
    """See the module's text."""

    async def pack_diff(self, sandbox_id: str, request: PackRequest) -> PackResult:
        """Everything in the sandbox stands still while the writable layer is copied by reference; the copy is then packed at leisure."""
        sandbox = self.live(sandbox_id)
        backend = self.backends[sandbox.backend]
        require(backend, "pack_diff", f"pack_diff of sandbox {sandbox.id}")
        self.images.check_pack(request)
        await self.reach(sandbox)
        name = f"{sandbox.id}.p{random_text(8)}"
        await self.call(sandbox, wire.F_SNAPSHOT, wire.text(wire.T_NAME, name), again=False)
        try:
            mounts_of, tree = await backend.snapshot(name)
            origin = DiffOrigin(
                sandbox=sandbox.id,
                mounts_of=mounts_of,
                tree=tree,
                uid_base=self.config.uid_base + sandbox.slot * SLOT_SIZE,
                layers=tuple(sandbox.layers),
                image=sandbox.image,
                user=sandbox.user,
                workdir=sandbox.workdir,
            )
            return await self.images.pack(origin, request)
        finally:
            await asyncio.shield(backend.drop_snapshot(name))
