"""How a person sees rollouts: a trajectory to read, and bars for a job that runs."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dsec.cli.common import printable
from dsec.rollout.schema import (
    AnyEvent,
    Began,
    Boxed,
    Command,
    Ended,
    JobInfo,
    Joined,
    Message,
    Note,
    Observed,
    Outcome,
    Partial,
    RolloutInfo,
    Scored,
    Spawned,
    Turn,
)

SHOWN = 4000  # characters of one text


class Reader:
    """Prints events one after another."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = 0.0
        self._partial = False

    def show(self, event: AnyEvent) -> None:
        """One event."""
        self._began = self._began or event.at
        if self._partial and not isinstance(event, Partial):
            self._console.print()
            self._partial = False
        match event:
            case Began():
                self._head(
                    event, "bold", f"rollout {event.stream}", f"job {event.job}, task {event.task.id or '-'}, {event.task.scaffold.name}"
                )
            case Boxed():
                self._head(event, "dim", f"sandbox {event.sandbox}", event.how)
            case Partial():
                self._partial = True
                self._console.print(escape(printable(event.text)), end="", style="dim")
            case Turn():
                for message in event.context:
                    if message.role in ("system", "user"):
                        self._message(event, message)
                detail = f"{event.generated} tokens, model version {', '.join(str(v) for _, v in event.versions) or '-'}"
                detail += f", went on {event.continued} times" if event.continued else ""
                detail += f", began again {event.restarted} times" if event.restarted else ""
                self._head(event, "green", "assistant", detail)
                self._text(event.message.content)
                for call in event.message.tool_calls:
                    self._text(f"{call.name}({call.arguments})")
            case Command():
                self._head(event, "yellow", "runs", event.id)
                self._text(event.shell if event.shell is not None else " ".join(event.argv or []))
            case Observed():
                self._observed(event)
            case Spawned():
                self._head(event, "magenta", f"starts {len(event.children)} agents", f"{event.refused} refused" if event.refused else "")
            case Joined():
                self._head(event, "magenta", "agents have ended", "")
                for child in event.children:
                    self._text(f"{child.rollout} {child.cause.value}: {child.answer[:200] or child.detail[:200]}")
            case Note():
                self._head(event, "cyan", event.what, event.detail)
            case Scored():
                self._head(
                    event, "blue", f"verdict {event.verdict.value}", f"reward {event.reward}, {event.passes} runs passed {event.detail}"
                )
            case Ended():
                self._head(event, "bold", f"ended: {event.cause.value}{' (masked)' if event.masked else ''}", event.detail)
                self._text(event.answer)
            case _:
                self._head(event, "dim", type(event).__name__, "")

    def _observed(self, event: Observed) -> None:
        style = "dim" if event.ok else "red"
        how = f"{event.ending} {event.exit_code}" if event.outcome is Outcome.ENDED else f"{event.outcome.value}: {event.cause}"
        limits = f", reached {', '.join(event.limits_hit)}" if event.limits_hit else ""
        self._head(event, style, how, f"{max(0.0, event.ended - event.began):.3f} s{limits}")
        self._text(event.stdout)
        self._text(event.stderr)

    def _message(self, event: Turn, message: Message) -> None:
        self._head(event, "bold" if message.role == "user" else "dim", message.role, "")
        self._text(message.content)

    def _head(self, event: AnyEvent, style: str, what: str, detail: str) -> None:
        line = f"[{style}]{event.at - self._began:8.2f}  {escape(printable(what))}[/]"
        self._console.print(line + (f"  [dim]{escape(printable(detail))}[/]" if detail.strip() else ""))

    def _text(self, content: object) -> None:
        text = printable(str(content).strip())
        if len(text) > SHOWN:
            text = f"{text[: SHOWN // 2]}\n[... {len(text) - SHOWN} characters ...]\n{text[-SHOWN // 2 :]}"
        for line in text.splitlines():
            self._console.print(f"          {escape(line)}")


class Board:
    """Progress of a job: how many have finished, a bar for each that runs. On a terminal only."""

    ROWS = 12

    def __init__(self, job: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._all = self._progress.add_task(f"job {job}", total=None, note="")
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Board:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def update(self, job: JobInfo, infos: list[RolloutInfo]) -> None:
        """Show what there is now."""
        note = f"{job.state}, {job.running} running" + (f", {job.masked} masked" if job.masked else "")
        self._progress.update(self._all, completed=job.finished, total=job.finished + job.running + job.queued, note=note)
        running = {info.id: info for info in infos if info.state == "running"}
        for id in self._bars.keys() - running.keys():
            self._progress.remove_task(self._bars.pop(id))
        for id, info in running.items():
            if id not in self._bars and len(self._bars) < self.ROWS:
                self._bars[id] = self._progress.add_task(f"  {id[:8]} {printable(info.task)[:20]}", total=None, note="")
            if id in self._bars:
                self._progress.update(self._bars[id], completed=info.turns, note=f"{info.tokens} tokens")
