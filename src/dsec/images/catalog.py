"""The catalog: which layers there are, what they are called, and the environments that name them. SQLite, one file, WAL.

A layer is a digest; names are labels on digests, and the newest label of a name wins. The file carries a version: one that this code does
not know is refused.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.images.manifest import decode_manifest, encode_manifest
from libdsec.errors import DSecError, LayerInUse, LayerNotFound
from libdsec.wire import EnvironmentInfo, EnvironmentSpec, LayerInfo

VERSION = 3  # of the file
SCHEMA = """
CREATE TABLE layers (digest TEXT PRIMARY KEY, kind TEXT NOT NULL, size INTEGER NOT NULL, source TEXT NOT NULL, created_at REAL NOT NULL,
                     damaged TEXT) WITHOUT ROWID;
CREATE TABLE names (name TEXT NOT NULL, digest TEXT NOT NULL REFERENCES layers, bound_at REAL NOT NULL,
                    PRIMARY KEY (name, digest)) WITHOUT ROWID;
CREATE TABLE parents (digest TEXT NOT NULL REFERENCES layers, position INTEGER NOT NULL, parent TEXT NOT NULL REFERENCES layers,
                      PRIMARY KEY (digest, position)) WITHOUT ROWID;
CREATE TABLE environments (name TEXT NOT NULL, tag TEXT NOT NULL, digest TEXT NOT NULL, manifest TEXT NOT NULL, created_at REAL NOT NULL,
                           PRIMARY KEY (name, tag)) WITHOUT ROWID;
CREATE TABLE environment_layers (name TEXT NOT NULL, tag TEXT NOT NULL, digest TEXT NOT NULL REFERENCES layers,
                                 FOREIGN KEY (name, tag) REFERENCES environments ON DELETE CASCADE);
CREATE INDEX environment_layers_digest ON environment_layers (digest);
CREATE INDEX parents_parent ON parents (parent);
"""
# What a version added. `made_from`: which input (an OCI layer, a build step) a layer was made of, so that it is not made again.
# `current`: the name stands for this layer; a name that is 0 went to a newer one and never comes back by itself.
# `leases`: who holds a layer, for whatever reason of its own, and how long.
ADDED = {
    2: """
CREATE TABLE made_from (input TEXT PRIMARY KEY, digest TEXT NOT NULL REFERENCES layers ON DELETE CASCADE) WITHOUT ROWID;
CREATE INDEX made_from_digest ON made_from (digest);
""",
    3: """
ALTER TABLE names ADD COLUMN current INTEGER NOT NULL DEFAULT 1;
UPDATE names SET current=0 WHERE EXISTS (SELECT 1 FROM names newer WHERE newer.name=names.name AND newer.bound_at>names.bound_at);
CREATE TABLE leases (digest TEXT NOT NULL REFERENCES layers ON DELETE CASCADE, holder TEXT NOT NULL, until REAL NOT NULL,
                     PRIMARY KEY (digest, holder)) WITHOUT ROWID;
""",
}


class Catalog:
    """Synchronous and thread safe; every call is one short transaction."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._own = 0  # changes made here; PRAGMA data_version counts those of others
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA foreign_keys=ON")
        with self._write() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise DSecError(f"{path} has catalog version {version}; this dsec knows {VERSION}")
            steps = ([SCHEMA] if version == 0 else []) + [ADDED[n] for n in range(max(version, 1) + 1, VERSION + 1)]
            for statement in ";\n".join(steps).split(";\n"):
                if statement.strip():
                    db.execute(statement)
            if steps:
                db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            self._own += 1

    def generation(self) -> tuple[int, int]:
        """Changes whenever anyone, this process or another, changed the catalog."""
        with self._lock:
            return self._own, self._db.execute("PRAGMA data_version").fetchone()[0]

    # ------------------------------------------------------------------------------------------------------------------------------ layers

    def add(self, digest: str, name: str, kind: str, size: int, parents: list[str], source: str) -> LayerInfo:
        """Record a published layer. A known digest gets one more name; its parents and source stay."""
        now = time.time()
        with self._write() as db:
            known = db.execute("SELECT 1 FROM layers WHERE digest=?", (digest,)).fetchone()
            if known:
                db.execute("UPDATE layers SET damaged=NULL WHERE digest=?", (digest,))
            else:
                db.execute("INSERT INTO layers VALUES (?,?,?,?,?,NULL)", (digest, kind, size, source, now))
                for position, parent in enumerate(parents):
                    if parent == digest:
                        continue
                    if not db.execute("SELECT 1 FROM layers WHERE digest=?", (parent,)).fetchone():
                        raise LayerNotFound(f"parent layer {parent} was removed meanwhile", layer=parent)
                    db.execute("INSERT INTO parents VALUES (?,?,?)", (digest, position, parent))
            db.execute("UPDATE names SET current=0 WHERE name=?", (name,))
            db.execute("INSERT OR REPLACE INTO names VALUES (?,?,?,1)", (name, digest, now))
            return self._info(digest, name)

    def _info(self, digest: str, name: str) -> LayerInfo:
        row = self._db.execute("SELECT kind,size,source,created_at FROM layers WHERE digest=?", (digest,)).fetchone()
        return LayerInfo(
            digest=digest,
            name=name,
            kind=row[0],
            size=row[1],
            source=row[2],
            created_at=row[3],
            current=self.find(name) == digest,
            parents=self.parents(digest),
            used_by=self.users(digest),
        )

    def layers(self) -> list[LayerInfo]:
        """One entry for each name of each layer, newest first."""
        with self._lock:
            rows = self._db.execute("SELECT digest,name FROM names ORDER BY bound_at DESC, name").fetchall()
            return [self._info(digest, name) for digest, name in rows]

    def layer(self, digest: str, name: str | None = None) -> LayerInfo:
        """One layer by digest; `name`: which of its names to show."""
        with self._lock:
            row = self._db.execute(
                "SELECT name FROM names WHERE digest=? ORDER BY name=? DESC, bound_at DESC", (digest, name or "")
            ).fetchone()
            if row is None:
                raise LayerNotFound(f"no layer {digest}", layer=digest)
            return self._info(digest, row[0])

    def find(self, reference: str) -> str | None:
        """Digest of the newest layer of a name, or of a digest that is known."""
        with self._lock:
            if reference.startswith("sha256:"):
                row = self._db.execute("SELECT digest FROM layers WHERE digest=?", (reference,)).fetchone()
            else:
                row = self._db.execute("SELECT digest FROM names WHERE name=? AND current=1", (reference,)).fetchone()
            return row[0] if row else None

    def parents(self, digest: str) -> list[str]:
        """Direct parents, base first."""
        with self._lock:
            return [row[0] for row in self._db.execute("SELECT parent FROM parents WHERE digest=? ORDER BY position", (digest,))]

    def digests(self) -> dict[str, tuple[int, str | None]]:
        """Every layer with its size and, when it was found damaged, why."""
        with self._lock:
            return {row[0]: (row[1], row[2]) for row in self._db.execute("SELECT digest,size,damaged FROM layers")}

    def made_from(self, source: str) -> str | None:
        """The layer that was made of this input; None when there is none or its file was found damaged."""
        with self._lock:
            row = self._db.execute(
                "SELECT l.digest FROM made_from m JOIN layers l ON l.digest=m.digest WHERE m.input=? AND l.damaged IS NULL", (source,)
            ).fetchone()
            return row[0] if row else None

    def set_made_from(self, source: str, digest: str) -> None:
        """Remember of which input a layer was made; forgotten with the layer."""
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO made_from VALUES (?,?)", (source, digest))

    def set_damaged(self, digest: str, why: str | None) -> None:
        """Mark a layer's file as bad (or good again)."""
        with self._write() as db:
            db.execute("UPDATE layers SET damaged=? WHERE digest=?", (why, digest))

    def lease(self, digest: str, holder: str, until: float) -> None:
        """Hold a layer; a time that has passed lets go of it. A later lease of the same holder replaces the earlier one."""
        with self._write() as db:
            db.execute("DELETE FROM leases WHERE until<=? OR (digest=? AND holder=?)", (time.time(), digest, holder))
            if until > time.time():
                db.execute("INSERT INTO leases VALUES (?,?,?)", (digest, holder, until))

    def superseded(self, before: float) -> dict[str, str]:
        """Layers that no name stands for any more, with one that did; bound before a time. Names that a build or an import gave to what it
        made on the way do not count."""
        with self._lock:
            query = (
                "SELECT digest, max(name) FROM names GROUP BY digest HAVING max(bound_at)<? "
                "AND max(current AND name NOT LIKE 'oci/%' AND name NOT LIKE 'build/%' AND name NOT LIKE 'remote/%')=0"
            )
            return dict(self._db.execute(query, (before,)).fetchall())

    def users(self, digest: str) -> list[str]:
        """Environments, layers and leases that need this layer."""
        with self._lock:
            environments = self._db.execute("SELECT DISTINCT name||':'||tag FROM environment_layers WHERE digest=?", (digest,)).fetchall()
            children = self._db.execute(
                "SELECT DISTINCT p.digest, (SELECT name FROM names n WHERE n.digest=p.digest ORDER BY bound_at DESC LIMIT 1) "
                "FROM parents p WHERE parent=?",
                (digest,),
            ).fetchall()
            leases = self._db.execute("SELECT holder FROM leases WHERE digest=? AND until>?", (digest, time.time())).fetchall()
        return (
            [f"environment {row[0]}" for row in environments]
            + [f"layer {row[1] or row[0]}" for row in children]
            + [f"lease {row[0]}" for row in leases]
        )

    def remove(self, reference: str, pinned: list[str]) -> tuple[str, bool]:
        """Take a name off a layer, and the layer out of the catalog with its last name (a digest: all names).

        Returns (digest, layer gone).
        """
        with self._write() as db:
            digest = self.find(reference)
            if digest is None:
                raise LayerNotFound(f"no layer {reference}", layer=reference)
            if not reference.startswith("sha256:"):
                others = db.execute("SELECT count(*) FROM names WHERE digest=? AND name<>?", (digest, reference)).fetchone()[0]
                if others:
                    db.execute("DELETE FROM names WHERE digest=? AND name=?", (digest, reference))
                    return digest, False
            users = self.users(digest) + pinned
            if users:
                raise LayerInUse(
                    f"layer {reference} is used by {', '.join(users[:5])}" + (f" and {len(users) - 5} more" if len(users) > 5 else ""),
                    layer=digest,
                    used_by=users,
                )
            db.execute("DELETE FROM names WHERE digest=?", (digest,))
            db.execute("DELETE FROM parents WHERE digest=?", (digest,))
            db.execute("DELETE FROM layers WHERE digest=?", (digest,))
            return digest, True

    # ------------------------------------------------------------------------------------------------------------------------ environments

    def put_environment(self, name: str, tag: str, spec: EnvironmentSpec) -> EnvironmentInfo:
        """Bind `name:tag` to a manifest whose layers are digests; replaces what it was bound to."""
        manifest = encode_manifest(spec)
        digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
        with self._write() as db:
            db.execute("DELETE FROM environments WHERE name=? AND tag=?", (name, tag))
            db.execute("INSERT INTO environments VALUES (?,?,?,?,?)", (name, tag, digest, manifest.decode(), time.time()))
            for layer in dict.fromkeys(spec.layers):
                if self.find(layer) is None:
                    raise LayerNotFound(f"no layer {layer}", layer=layer)
                db.execute("INSERT INTO environment_layers VALUES (?,?,?)", (name, tag, layer))
        found = self.environment(name, tag)
        assert found is not None
        return found

    def environment(self, name: str, tag: str) -> EnvironmentInfo | None:
        """One environment."""
        with self._lock:
            row = self._db.execute(
                "SELECT name,tag,digest,manifest,created_at FROM environments WHERE name=? AND tag=?", (name, tag)
            ).fetchone()
        return _environment(row) if row else None

    def environments(self) -> list[EnvironmentInfo]:
        """All of them, by name."""
        with self._lock:
            rows = self._db.execute("SELECT name,tag,digest,manifest,created_at FROM environments ORDER BY name,tag").fetchall()
        return [_environment(row) for row in rows]

    def remove_environment(self, name: str, tag: str) -> bool:
        """Forget one; its layers stay."""
        with self._write() as db:
            return db.execute("DELETE FROM environments WHERE name=? AND tag=?", (name, tag)).rowcount > 0


def _environment(row: tuple[str, str, str, str, float]) -> EnvironmentInfo:
    spec = decode_manifest(row[3])
    return EnvironmentInfo(
        name=row[0] if row[1] == "latest" else f"{row[0]}:{row[1]}",
        digest=row[2],
        created_at=row[4],
        **{name: getattr(spec, name) for name in EnvironmentSpec.__struct_fields__},
    )
