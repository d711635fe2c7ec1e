"""Templates and snapshots. A template is the alias of an environment, nothing else."""

from __future__ import annotations

from dsec.faces.e2b.boxes import Boxes
from dsec.faces.e2b.control import PAGE, PAGE_MAX, copied, number
from dsec.faces.e2b.errors import invalid, refused
from dsec.faces.e2b.http import Request
from libdsec import errors


class Templates:
    """Handlers."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    async def alias(self, request: Request, alias: str) -> None:
        """Whether sandboxes can be made of it."""
        if not await self._environment(alias) and await self.boxes.snapshot(alias) is None:
            raise self.boxes.no_template(alias)
        await request.json({"templateID": alias, "public": False})

    async def remove(self, request: Request, template: str) -> None:
        """A snapshot, by id or name. Environments are removed by the owner of the node only."""
        snapshot = await self.boxes.snapshot(template)
        if snapshot is not None:
            await self.boxes.client.snapshots.remove(snapshot)
            await request.empty()
            return
        if await self._environment(template):
            raise refused("removing an environment", "template_removal_unsupported")
        raise self.boxes.no_template(template)

    async def snapshots(self, request: Request) -> None:
        """Newest first, in pages."""
        params = request.only("sandboxID", "name", "limit", "nextToken")
        found = await self.boxes.client.snapshots.list(params.get("sandboxID"))
        if "name" in params:
            found = [one for one in found if one.name == params["name"]]
        found.sort(key=lambda one: (one.created_at, one.id), reverse=True)
        if "nextToken" in params:
            places = [at for at, one in enumerate(found) if one.id == params["nextToken"]]
            if not places:
                raise invalid("nextToken is not one of ours, or its snapshot was removed")
            found = found[places[0] + 1 :]
        limit = number(params, "limit", PAGE, PAGE_MAX)
        page, more = found[:limit], len(found) > limit
        await request.json([copied(one) for one in page], headers={"x-next-token": page[-1].id} if more else None)

    async def refuse(self, request: Request) -> None:
        """Tags are given when a template is built."""
        raise refused("changing tags of a template", "template_tags_unsupported")

    async def _environment(self, alias: str) -> bool:
        try:
            await self.boxes.client.environments.get(self.boxes.settings.templates.get(alias, alias))
        except (errors.LayerNotFound, errors.InvalidRequest):  # it cannot be the name of one
            return False
        return True
