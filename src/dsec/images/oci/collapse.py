"""Images of very many layers: neighbours become one, so that a sandbox's stack has room for what is put on top.

A sandbox takes 64 layers; an image may have 127 and more. The neighbours that are smallest together are merged first: what is large stays
a layer of its own, which other images have too. Deletions stay where something below needs them.
"""
from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from dsec.images import squash
from libdsec.wire import Progress

if TYPE_CHECKING:
    from dsec.images.service import Images

MOST = 48  # layers of an imported image; the rest of a sandbox's 64 is for workspace, toolkits and diffs


def groups(sizes: Sequence[int], most: int) -> list[int]:
    """How many neighbours become one, from the lowest up: at most `most` groups, those of the least size merged."""
    found = [[1, size] for size in sizes]  # layers, bytes
    while len(found) > most:
        at = min(range(len(found) - 1), key=lambda i: (found[i][1] + found[i + 1][1], -i))  # the lower ones are more often shared
        found[at : at + 2] = [[found[at][0] + found[at + 1][0], found[at][1] + found[at + 1][1]]]
    return [layers for layers, _ in found]


async def collapse(images: Images, name: str, stack: list[str], form: str) -> AsyncGenerator[Progress, None]:
    """Change `stack`, base first, to at most MOST layers. A group that was merged before is not merged again."""
    if len(stack) <= MOST:
        return
    before = list(stack)
    sizes = [(await images.get(digest)).size for digest in before]
    stack.clear()
    at = 0
    for count in groups(sizes, MOST):
        group = before[at : at + count]
        at += count
        if count == 1:
            stack.extend(group)
            continue
        # what a merged layer holds depends on what lies below, whose deletions it keeps
        key = f"{form}:group:sha256:{hashlib.sha256(' '.join([*stack, '', *group]).encode()).hexdigest()}"
        if images.made_from(key) is None:
            async for line in _merge(images, name, group, stack, key):
                yield Progress(message=f"{count} layers as one: {line.message}", fraction=line.fraction)
        made = images.made_from(key)
        assert made is not None
        stack.append(made)


def _merge(images: Images, name: str, group: list[str], below: list[str], key: str) -> AsyncGenerator[Progress, None]:
    program = squash.program([images.layer(one) for one in group], [images.layer(one) for one in below])
    label, source = f"oci/{key.rpartition(':')[2][:16]}", f"oci {name}: {len(group)} layers as one"
    return images.make(label, "base", below[-1:], "/", source, lambda work: program, made_from=lambda result: key)
