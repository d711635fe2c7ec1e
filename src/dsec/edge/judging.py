"""Verdicts: what is known of a sandbox, from all that has a part in it, put before the rules of `dsec.guard.verdicts`."""
from __future__ import annotations

from dsec.edge import wire
from dsec.edge.lifecycle import Sandbox
from dsec.edge.scanning import Scanning
from dsec.guard import events
from dsec.guard.verdicts import Event, Facts, fault, judge
from libdsec.residue import ScanReport, ScanRequest
from libdsec.verdicts import Assessment
from libdsec.wire import State


class Judging(Scanning):
    """See the module's text."""

    async def assess(self, sandbox_id: str, scan: ScanRequest | None = None) -> Assessment:
        """All verdicts about it, of what is known now. `scan`: also of what a scan finds. One that ended is judged by what it left."""
        sandbox = self.table.get(sandbox_id)
        report = None if scan is None else await self.scan(sandbox_id, scan)
        facts = await self._facts(sandbox, report)
        verdicts = judge(facts)
        return Assessment(
            sandbox=sandbox.id, verdicts=verdicts, fault=fault(facts), fault_detail=sandbox.detail, scanned=report is not None,
            worst=verdicts[0].level if verdicts else None,
        )  # fmt: skip

    async def _facts(self, sandbox: Sandbox, report: ScanReport | None) -> Facts:
        page = self.events.page(sandbox.id, None, 0, events.MOST)
        records = await self.records(sandbox) if sandbox.kept else []
        dropped = {record.command: record.out_dropped + record.err_dropped for record in records}
        return Facts(
            events=[Event(one.kind, one.at, one.count, one.details) for one in page.events],
            damage=sandbox.damage,
            cause=sandbox.cause.value if sandbox.cause is not None else None,
            detail=sandbox.detail,
            pids_hits=(await self.usage(sandbox.id)).pids_hits if sandbox.state is State.RUNNING else 0,
            dropped=dropped,
            disk_full=[record.command for record in records if record.limits & wire.LIMIT_DISK],
            scan=report,
        )


