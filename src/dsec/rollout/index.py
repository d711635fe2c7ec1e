"""What SQL knows of the log: where each record is, what each rollout has become, and the order in which they finished.

It is derived: it may lag behind the log or be removed, and is made again from it. Written in the log's thread, a transaction a batch,
without fsync; read on a connection of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dsec.rollout.log import Place
from dsec.rollout.schema import (
    MASKED,
    AnyEvent,
    BatchTaken,
    Began,
    Boxed,
    Cause,
    Ended,
    JobBegan,
    JobChanged,
    RolloutInfo,
    Scored,
    Spawned,
    Turn,
    Verdict,
)

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), segment INTEGER, byte INTEGER, at REAL);
CREATE TABLE IF NOT EXISTS records (stream TEXT, seq INTEGER, segment INTEGER, byte INTEGER, size INTEGER, PRIMARY KEY (stream, seq))
WITHOUT ROWID; CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, state TEXT, began REAL);
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, job TEXT, state TEXT, task TEXT, grp TEXT, member INTEGER, parent TEXT, began REAL, ended REAL, cause TEXT,
    masked INTEGER DEFAULT 0, reward REAL, verdict TEXT, turns INTEGER DEFAULT 0, tokens INTEGER DEFAULT 0, sandbox TEXT, detail TEXT
    DEFAULT '' );
CREATE INDEX IF NOT EXISTS rollouts_by_job ON rollouts (job, state);
CREATE TABLE IF NOT EXISTS finished (n INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, rollout TEXT UNIQUE);
CREATE INDEX IF NOT EXISTS finished_by_job ON finished (job, n);
"""
_COLUMNS = "id, job, state, task, grp, member, parent, began, ended, cause, masked, reward, verdict, turns, tokens, sandbox, detail"


class Index:
    """The database of one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._write = self._connect()
        if self._write.execute("PRAGMA user_version").fetchone()[0] not in (0, VERSION):
            self._write.close()
            path.unlink()
            self._write = self._connect()
        self._write.executescript(_TABLES)
        self._write.execute(f"PRAGMA user_version = {VERSION}")
        self._read = self._connect()

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("PRAGMA synchronous = OFF")  # the log is what is durable
        return made

    def close(self) -> None:
        """Let go."""
        self._read.close()
        self._write.close()

    # writing, in the log's thread -----------------------------------------------------------------------------------------------
    def position(self) -> tuple[int, int, float]:
        """Segment and byte up to which the log is indexed, and when the last of it was written; zeros: nothing is."""
        row = self._write.execute("SELECT segment, byte, at FROM position").fetchone()
        return (row[0], row[1], row[2]) if row else (0, 0, 0.0)

    def apply(self, batch: Sequence[tuple[Place, AnyEvent]]) -> None:
        """Take in records that have become durable, in their order."""
        db = self._write
        db.execute("BEGIN")
        try:
            db.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
                [(event.stream, event.seq, place.segment, place.offset, place.size) for place, event in batch],
            )
            for _, event in batch:
                self._project(db, event)
            last, event = batch[-1]
            db.execute("INSERT OR REPLACE INTO position VALUES (1, ?, ?, ?)", (last.segment, last.offset + last.size, event.at))
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def _project(self, db: sqlite3.Connection, event: AnyEvent) -> None:
        match event:
            case Turn():
                db.execute("UPDATE rollouts SET turns = turns + 1, tokens = tokens + ? WHERE id = ?", (event.generated, event.stream))
            case BatchTaken():
                job, batch = event.stream, event.batch
                rows = [
                    (id, job, "queued", task.id, ids[0], member)
                    for task, ids in zip(batch.tasks, event.rollouts, strict=True)
                    for member, id in enumerate(ids)
                ]
                db.executemany("INSERT OR IGNORE INTO rollouts (id, job, state, task, grp, member) VALUES (?, ?, ?, ?, ?, ?)", rows)
            case Spawned():
                row = db.execute("SELECT job FROM rollouts WHERE id = ?", (event.stream,)).fetchone()
                below = [
                    (id, row[0] if row else "", "queued", t.id, "", 0, event.stream)
                    for id, t in zip(event.children, event.tasks, strict=True)
                ]
                db.executemany(
                    "INSERT OR IGNORE INTO rollouts (id, job, state, task, grp, member, parent) VALUES (?, ?, ?, ?, ?, ?, ?)", below
                )
            case Began():
                db.execute("UPDATE rollouts SET state = 'running', began = ? WHERE id = ? AND state = 'queued'", (event.at, event.stream))
            case Boxed():
                db.execute("UPDATE rollouts SET sandbox = ? WHERE id = ?", (event.sandbox, event.stream))
            case Scored():
                db.execute("UPDATE rollouts SET verdict = ?, reward = ? WHERE id = ?", (event.verdict.value, event.reward, event.stream))
            case Ended():
                db.execute(
                    "UPDATE rollouts SET state = 'ended', ended = ?, cause = ?, masked = ?, reward = ?, detail = ? WHERE id = ?",
                    (event.at, event.cause.value, int(event.masked), event.reward, event.detail[:500], event.stream),
                )
                db.execute(
                    "INSERT OR IGNORE INTO finished (job, rollout) SELECT job, id FROM rollouts WHERE id = ? AND parent IS NULL",
                    (event.stream,),
                )
            case JobBegan():
                db.execute("INSERT OR IGNORE INTO jobs VALUES (?, 'running', ?)", (event.stream, event.at))
            case JobChanged(state="forgotten"):
                _forget(db, event.stream)
            case JobChanged() if event.state is not None:
                db.execute("UPDATE jobs SET state = ? WHERE id = ?", (event.state, event.stream))

    # reading --------------------------------------------------------------------------------------------------------------------
    def places(self, stream: str, after: int = -1, limit: int = -1) -> list[Place]:
        """Where the records of a stream are, from the one after `after`."""
        rows = self._read.execute(
            "SELECT segment, byte, size FROM records WHERE stream = ? AND seq > ? ORDER BY seq LIMIT ?", (stream, after, limit)
        )
        return [Place(*row) for row in rows]

    def length(self, stream: str) -> int:
        """How many records it has."""
        found: int = self._read.execute("SELECT coalesce(max(seq) + 1, 0) FROM records WHERE stream = ?", (stream,)).fetchone()[0]
        return found

    def in_use(self) -> set[int]:
        """Segments that hold a record of somebody's."""
        return {row[0] for row in self._read.execute("SELECT DISTINCT segment FROM records")}

    def jobs(self) -> list[tuple[str, str, float]]:
        """Ids, states, begin; oldest first."""
        return list(self._read.execute("SELECT id, state, began FROM jobs ORDER BY began"))

    def rollout(self, id: str) -> RolloutInfo | None:
        """One rollout."""
        row = self._read.execute(f"SELECT {_COLUMNS} FROM rollouts WHERE id = ?", (id,)).fetchone()
        return _info(row) if row else None

    def rollouts(
        self, *, job: str | None = None, states: Iterable[str] = (), parent: str | None = None, limit: int = -1
    ) -> list[RolloutInfo]:
        """Those of a job, in these states, below a parent; in the order in which they came."""
        wanted, values = ["1"], list[Any]()
        for column, value in (("job", job), ("parent", parent)):
            if value is not None:
                wanted.append(f"{column} = ?")
                values.append(value)
        if states := list(states):
            wanted.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        query = f"SELECT {_COLUMNS} FROM rollouts WHERE {' AND '.join(wanted)} ORDER BY rowid LIMIT ?"
        return [_info(row) for row in self._read.execute(query, (*values, limit))]

    def counts(self, job: str) -> dict[str, int]:
        """Rollouts of a job by state, sub-agents apart; `masked` of those that ended."""
        rows = self._read.execute(
            "SELECT state, count(*), sum(masked) FROM rollouts WHERE job = ? AND parent IS NULL GROUP BY state", (job,)
        )
        found = {"queued": 0, "running": 0, "ended": 0, "masked": 0}
        for state, count, masked in rows:
            found[state] = count
            found["masked"] += masked or 0
        return found

    def finished(self, job: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Cursors and ids of rollouts that finished, in that order."""
        return list(self._read.execute("SELECT n, rollout FROM finished WHERE job = ? AND n > ? ORDER BY n LIMIT ?", (job, after, limit)))


def _forget(db: sqlite3.Connection, job: str) -> None:
    """Remove a job and its rollouts; their records are nobody's then."""
    streams = [job, *(row[0] for row in db.execute("SELECT id FROM rollouts WHERE job = ?", (job,)))]
    db.executemany("DELETE FROM records WHERE stream = ?", [(stream,) for stream in streams])
    for table, column in (("rollouts", "job"), ("finished", "job"), ("jobs", "id")):
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", (job,))


def _info(row: tuple[Any, ...]) -> RolloutInfo:
    id, job, state, task, group, member, parent, began, ended, cause, masked, reward, verdict, turns, tokens, sandbox, detail = row
    return RolloutInfo(
        id=id, job=job, state=state, task=task or "", group=group or "", member=member or 0, parent=parent, began=began, ended=ended,
        cause=Cause(cause) if cause else None, masked=bool(masked), reward=reward, verdict=Verdict(verdict) if verdict else None,
        turns=turns, tokens=tokens, sandbox=sandbox, detail=detail or "",
    )  # fmt: skip


assert frozenset(Cause) > MASKED
