"""Which layers are garbage, and their removal.

Garbage is a layer that lost all its names to newer layers and that nothing needs: no environment, no sandbox, no lease, no layer above it
that stays. What has a name of its own is never garbage, used or not: `dsec layer rm` is for that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from libdsec.errors import LayerInUse, LayerNotFound
from libdsec.wire import GcItem, GcResult

if TYPE_CHECKING:
    from dsec.images.service import Images


async def collect(images: Images, *, dry_run: bool, min_age: float) -> GcResult:
    """Remove garbage that is older than `min_age` seconds, or only say what would go. Layers above go before those below."""
    before = time.time() - min_age
    result = GcResult(dry_run=dry_run)
    waiting = images.superseded(before)
    while waiting:
        gone = set()
        for digest, name in waiting.items():
            layer = await images.get(digest)
            doomed = {f"layer {item.digest}" for item in result.removed} | {f"layer {item.name}" for item in result.removed}
            needed = [user for user in layer.used_by if not (dry_run and user in doomed)]
            if needed:
                continue
            if not dry_run:
                try:
                    await images.remove(digest)
                except (LayerInUse, LayerNotFound):
                    continue  # somebody was faster
            result.removed.append(GcItem(digest=digest, name=name, size=layer.size, created_at=layer.created_at))
            result.bytes += layer.size
            gone.add(digest)
        if not gone:
            break
        waiting = {digest: name for digest, name in waiting.items() if digest not in gone}
    if not dry_run:
        result.swept = images.sweep()
    return result
