"""One rollout: its scaffold is driven to an end, the work is scored, the end is recorded, the sandbox goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dsec.rollout.boxes import GONE, Lost, steadily
from dsec.rollout.budget import Exhausted, Tree
from dsec.rollout.context import Context, Diverged, SetupFailed
from dsec.rollout.log import LogFailed
from dsec.rollout.policy import ContextFull, Refused
from dsec.rollout.schema import MASKED, AnyEvent, Began, Cause, Ended, Scored, Verdict
from dsec.rollout.scoring import gone, score
from libdsec.errors import DSecError

if TYPE_CHECKING:
    from dsec.rollout.jobs import Job

log = logging.getLogger("dsec.rollout.worker")
ANSWER_MAX = 64 << 10
SCORED = frozenset({Cause.DONE, Cause.LIMIT, Cause.BUDGET, Cause.AGENT_CRASH})
CRASHES = {"oom": Cause.AGENT_CRASH, "agent_crash": Cause.AGENT_CRASH, "expired": Cause.LIMIT, "stopped": Cause.CANCELLED}
AgentLoop = Callable[[Context], Awaitable[str]]


class Rollout:
    """A rollout that has begun. `recorded`: what earlier lives of it did."""

    def __init__(self, job: Job, began: Began, tree: Tree, loop: AgentLoop, recorded: list[AnyEvent]) -> None:
        self.job, self.began, self.tree, self.id = job, began, tree, began.stream
        self.children: set[str] = set()
        self._loop = loop
        self._recorded = recorded
        self._why: Cause | None = None
        self._context: Context | None = None
        self.task = asyncio.create_task(self._live(), name=f"rollout {self.id}")

    def cancel(self, cause: Cause) -> None:
        """End it for this reason."""
        if self._why is None:
            self._why = cause
            self.task.cancel()

    def oldest(self) -> int | None:
        """The oldest model version in it so far."""
        return self._context.oldest if self._context is not None else None

    async def _live(self) -> Ended:
        """To its end; the end is durable when this returns. Cancelled from outside without a reason, it stays as it is and is taken up
        again by the next life."""
        context = self._context = Context(self, self._recorded)
        self._recorded = []
        answer, cause, detail = "", Cause.DONE, ""
        try:
            answer = await self._loop(context)
        except asyncio.CancelledError:
            if self._why is None or asyncio.current_task().uncancel() > 0:  # type: ignore[union-attr]
                raise
            cause = self._why
        except Exhausted as error:
            cause, detail = error.cause, error.detail
        except Lost as error:
            cause, detail = CRASHES.get(error.cause, Cause.INFRA), error.detail
        except GONE as error:
            lost = str(error.details.get("cause") or "unknown")
            cause, detail = CRASHES.get(lost, Cause.INFRA), f"{error.code}: {error.message}"
        except ContextFull as error:
            cause, detail = Cause.LIMIT, f"context: {error}"
        except Refused as error:
            cause, detail = Cause.POLICY, str(error)
        except SetupFailed as error:
            cause, detail = Cause.SETUP, str(error)
        except Diverged as error:
            cause, detail = Cause.SCAFFOLD, str(error)
        except LogFailed:
            raise
        except DSecError as error:
            cause, detail = Cause.INFRA, f"{error.code}: {error.message}"
        except Exception:
            log.warning("rollout %s", self.id, exc_info=True)
            cause, detail = Cause.SCAFFOLD, traceback.format_exc(limit=-3)[-2000:]
        return await self._end(context, answer, cause, detail)

    async def _end(self, context: Context, answer: str, cause: Cause, detail: str) -> Ended:
        for child in self.children:
            self.job.cancel_child(child, cause)
        scored = await self._score(context, cause, detail)
        masked = cause in MASKED or (scored is not None and scored.verdict in (Verdict.INFRA, Verdict.GRADER_ERROR))
        end = Ended(
            cause=cause, masked=masked, answer=answer[:ANSWER_MAX], detail=detail[:2000], turns=context.turns, tokens=context.tokens,
            commands=context.commands, cpu_seconds=context.cpu_seconds, dropped=context.dropped + max(0, len(answer) - ANSWER_MAX),
            oldest=context.oldest, reward=scored.reward if scored else None, verdict=scored.verdict if scored else None,
        )  # fmt: skip
        self.job.store.append(self.id, end)
        await self.job.store.commit()
        self.job.store.done(self.id)
        with contextlib.suppress(DSecError):  # then the next service's sweep ends it, or its lease
            if (id := context.box_id) is not None:
                await steadily(lambda: self.job.boxes.stop(id), 30.0)
            elif self._why is not None:  # cut off while it was made
                await steadily(lambda: self.job.boxes.stop_role(self.id, "agent"), 30.0)
        return end

    async def _score(self, context: Context, cause: Cause, detail: str) -> Scored | None:
        task = self.began.task
        if task.scoring is None or cause not in SCORED:
            return None
        job = self.job
        if cause is Cause.AGENT_CRASH:
            scored = gone("agent_crash", detail)
        else:
            try:
                box = await context.box() if context.box_id is not None else None
                scored = await job.gate.hold(lambda: score(job.boxes, job.id, self.id, task, box))
            except DSecError as error:
                scored = Scored(verdict=Verdict.INFRA, reward=None, detail=f"{error.code}: {error.message}")
        job.store.append(self.id, scored)
        return scored
