"""What all commands share: running async code against the node, errors as exit statuses, tables or JSON, ids by prefix."""
from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:  # the SDK is loaded when a command runs: help and completion do without it
    from libdsec import DSecClient, DSecError, Sandbox

T = TypeVar("T")
PLATFORM, NOT_EXECUTABLE, NOT_FOUND, TIMEOUT = 125, 126, 127, 124  # exit statuses that are no command's own

JSON = typer.Option("--json", help="Machine-readable output.")
ALLOW = typer.Option("--allow", metavar="RULE", help="Network: a service, host, *.host, or [tcp:|udp:|icmp:]ADDRESS[/BITS][:PORT].")
DENY = typer.Option("--deny", metavar="RULE", help="Network: an exception to what --allow allows.")


def call(work: Callable[[DSecClient], Awaitable[T]]) -> T:
    """Run `work` with an opened client. A DSecError becomes `dsec: CODE: MESSAGE` on stderr and an exit status that no command can have."""

    from libdsec import DSecClient

    async def session() -> T:
        async with DSecClient() as client:
            return await work(client)

    return guarded(session())


def guarded(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, with errors as exit statuses."""
    import asyncio

    from libdsec.errors import DSecError

    async def ended_by_signals() -> T:
        """SIGTERM and SIGHUP end the work as Ctrl-C does: what it cleans up is cleaned up."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        got: list[int] = []

        def end(number: int) -> None:
            got.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end, number)
        try:
            return await work
        except asyncio.CancelledError:
            if got:
                raise typer.Exit(128 + got[0]) from None
            raise

    try:
        return asyncio.run(ended_by_signals())
    except DSecError as error:
        alone = error.code == "connection_failed" and error.message.startswith("cannot connect") and not os.environ.get("DSEC_URL")
        hint = "; `dsec up -d` starts a node on this machine, DSEC_URL names another" if alone else ""
        fail(f"{error.code}: {error.message}{hint}", status_of(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def each(references: Sequence[str], work: Callable[[DSecClient, str], Awaitable[str]]) -> None:
    """Do `work` for each of several names and print what it gives. One that cannot be done stops none of the others."""

    async def all_of_them(client: DSecClient) -> list[DSecError]:
        return await each_of(client, references, work)

    report(call(all_of_them))


async def each_of(client: DSecClient, references: Sequence[str], work: Callable[[DSecClient, str], Awaitable[str]]) -> list[DSecError]:
    """Errors of what could not be done; what could be is printed."""
    from libdsec.errors import DSecError

    errors: list[DSecError] = []
    for reference in references:
        try:
            print(await work(client, reference), flush=True)
        except DSecError as error:
            errors.append(error)
    return errors


def report(errors: Sequence[DSecError]) -> None:
    """Say what could not be done, and end as for the first of it."""
    for error in errors:
        say(f"{error.code}: {error.message}")
    if errors:
        raise typer.Exit(status_of(errors[0]))


def status_of(error: DSecError) -> int:
    """The exit status that stands for an error of the platform; a shell's own two for programs that cannot start."""
    from libdsec.errors import BinaryNotFound, NotExecutable

    return NOT_FOUND if isinstance(error, BinaryNotFound) else NOT_EXECUTABLE if isinstance(error, NotExecutable) else PLATFORM


def rules(allow: Sequence[str], deny: Sequence[str]) -> dict[str, bool]:
    """Network rules of two options."""
    return {**dict.fromkeys(allow, True), **dict.fromkeys(deny, False)}


def fail(message: str, status: int = PLATFORM) -> NoReturn:
    """Say what is wrong and end."""
    say(message)
    raise typer.Exit(status)


def say(message: str) -> None:
    """A line for people, on stderr."""
    print(f"dsec: {printable(message)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Without what could drive a terminal: names, labels and messages may come from an agent."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def show_json(what: Any) -> None:
    """One JSON document on stdout."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(what), indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Plain aligned columns: readable for people and safe to cut with other tools."""
    cells = [[printable(str(cell)).replace("\n", " ") for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    for row in [[name.upper() for name in columns], *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def age(then: float | None) -> str:
    """Time since, for people."""
    if then is None:
        return "-"
    seconds = max(0, int(time.time() - then))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    """KEY=VALUE texts."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            fail(f"invalid_request: {what} {text!r} is not KEY=VALUE", 2)
        found[key] = value
    return found


async def find(client: DSecClient, reference: str) -> Sandbox:
    """A sandbox by its id, by its name, or by the beginning of an id that no other has; a live one before one that ended."""
    from libdsec.errors import InvalidRequest, SandboxNotFound

    if len(reference) == 20:
        return await client.connect(reference)
    for state in (None, "ended"):
        infos = await client.list(state=state)
        named = [info for info in infos if info.name == reference]
        matching = named[-1:] or [info for info in infos if info.id.startswith(reference)]
        if len(matching) > 1:
            raise InvalidRequest(f"{reference!r} is the beginning of {len(matching)} sandbox ids")
        if matching:
            return await client.connect(matching[0].id)
    raise SandboxNotFound(f"no sandbox is named {reference!r} or has an id that begins so")


async def find_snapshot(client: DSecClient, reference: str) -> str:
    """The id of a snapshot, from the beginning of an id that no other has."""
    from libdsec.errors import InvalidRequest, SnapshotNotFound

    ids = [info.id for info in await client.snapshots.list()]
    matching = [reference] if reference in ids else [id for id in ids if id.startswith(reference)]
    if len(matching) > 1:
        raise InvalidRequest(f"{reference!r} is the beginning of {len(matching)} snapshot ids")
    if not matching:
        raise SnapshotNotFound(f"no snapshot has an id that begins with {reference!r}")
    return matching[0]


def complete_sandbox(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: names and ids of the live sandboxes."""
    import asyncio

    from libdsec import DSecClient

    async def live() -> list[tuple[str, str]]:
        async with DSecClient() as client, asyncio.timeout(2):
            infos = await client.list()
        return [(i.id, i.name or i.image or "") for i in infos] + [(i.name, i.id) for i in infos if i.name]

    try:
        return [(word, printable(note)) for word, note in asyncio.run(live()) if word.startswith(incomplete)]
    except Exception:  # nothing may be printed into somebody's prompt
        return []


CPU_CLASS = typer.Option("--cpu-class", metavar="CLASS", help="latency, or best_effort: on the CPU that nobody else wants.")
SANDBOX = typer.Argument(help="Id, beginning of an id, or name.", autocompletion=complete_sandbox)
SANDBOXES = typer.Argument(help="Ids, beginnings of ids, or names.", show_default=False, autocompletion=complete_sandbox)
