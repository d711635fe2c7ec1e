"""The three projects of the main job, as their published source archives, and the test runner that goes into a toolkit layer.

Archives come from the package index through pip, pinned by version and sha256. A project is kept in three parts: `files` (what an agent
may see), `tests` (hidden), and `sources` (the paths whose changes count as a solution).
"""
from __future__ import annotations

import asyncio
import hashlib
import io
import os
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class SetupFailed(Exception):
    """Something that the main job needs could not be made; the message names it."""


@dataclass(frozen=True)
class Pin:
    """One distribution: exact version and the sha256 of the one file that is accepted."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Recipe:
    """A project: where its sources and tests are inside the archive. `sources`: packages (directories) or single modules."""

    pin: Pin
    sources: tuple[str, ...]
    tests: dict[str, str]  # where they are in the archive: where they are kept, outside any package
    skip: tuple[str, ...] = ()  # modules that are not worth breaking (generated tables, version files)


RECIPES = (
    Recipe(
        Pin("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417"),
        sources=("inflection",),
        tests={"test_inflection.py": "test_inflection.py"},
    ),
    Recipe(
        Pin("parse", "1.20.2", "b41d604d16503c79d81af5165155c0b20f6c8d6c559efa66b4b695c3e5a0a0ce"),
        sources=("parse.py",),
        tests={"tests": "tests"},
    ),
    Recipe(
        Pin("toolz", "1.0.0", "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02"),
        sources=("toolz",),
        tests={"toolz/tests": "tests", "toolz/sandbox/tests": "sandbox_tests"},
        skip=("toolz/_signatures.py", "toolz/_version.py", "toolz/sandbox/parallel.py"),
    ),
)

RUNNER = (
    Pin("pytest", "8.3.5", "c69214aa47deac29fad6c2a4f590b9c4a9fdb16a403176fe154b79c0b4d4d820"),
    Pin("pluggy", "1.5.0", "44e1ad92c8ca002de6377e165f3e0f1be63266ab4d554740532335b9d75ea669"),
    Pin("iniconfig", "2.0.0", "b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374"),
    Pin("packaging", "24.2", "09abb1bccd265c01f4a3aa3f7a7db064b36514d2cba19a2f694fe6150451a759"),
)


@dataclass(frozen=True)
class Project:
    """An unpacked project: every path is relative to the project's directory."""

    name: str
    version: str
    sources: tuple[str, ...]
    skip: tuple[str, ...]
    files: dict[str, bytes]  # without tests
    tests: dict[str, bytes]

    def is_source(self, path: str) -> bool:
        """Is this path a place where a change counts as a solution?"""
        return any(path == source or path.startswith(source + "/") for source in self.sources)

    def modules(self) -> list[str]:
        """Source modules worth breaking."""
        return sorted(p for p in self.files if p.endswith(".py") and self.is_source(p) and p not in self.skip)


async def fetch_all(cache: Path) -> tuple[list[Project], dict[str, bytes]]:
    """All projects and the files of the test runner (paths relative to its directory). Downloads only what `cache` does not hold.

    Raises SetupFailed when pip fails or a file does not have its sha256.
    """
    os.makedirs(cache, exist_ok=True)
    wanted = [(recipe.pin, True) for recipe in RECIPES] + [(pin, False) for pin in RUNNER]
    archives = await asyncio.gather(*(_archive(cache, pin, source) for pin, source in wanted))
    projects = [_project(recipe, archive) for recipe, archive in zip(RECIPES, archives, strict=False)]
    runner: dict[str, bytes] = {}
    for archive in archives[len(RECIPES) :]:
        runner.update(_unzip(archive))
    return projects, runner


async def _archive(cache: Path, pin: Pin, source: bool) -> bytes:
    found = _cached(cache, pin)
    if found is not None:
        return found
    requirement = cache / f"{pin.name}.txt"
    requirement.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    form = ["--no-binary", pin.name] if source else ["--only-binary", pin.name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *form]
    process = await asyncio.create_subprocess_exec(
        *command, "--require-hashes", "--dest", str(cache), "--requirement", str(requirement),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    requirement.unlink()
    if process.returncode:
        raise SetupFailed(f"pip could not download {pin.name} {pin.version}: {output.decode(errors='replace')[-800:]}")
    found = _cached(cache, pin)
    if found is None:
        raise SetupFailed(f"pip downloaded {pin.name} {pin.version}, but no file has sha256 {pin.sha256}")
    return found


def _cached(cache: Path, pin: Pin) -> bytes | None:
    for path in cache.glob(f"{pin.name}-{pin.version}*"):
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == pin.sha256:
            return data
    return None


def _project(recipe: Recipe, archive: bytes) -> Project:
    files: dict[str, bytes] = {}
    tests: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix()
            content = tar.extractfile(member)
            if content is None or ".egg-info/" in path or path == "PKG-INFO":
                continue
            hidden = [kept + path[len(at) :] for at, kept in recipe.tests.items() if path == at or path.startswith(at + "/")]
            if not hidden:
                files[path] = content.read()
            elif not path.endswith("/__init__.py"):
                tests[hidden[0]] = content.read()
    for source in recipe.sources:
        if not any(p == source or p.startswith(source + "/") for p in files):
            raise SetupFailed(f"{recipe.pin.name} {recipe.pin.version} has no {source}")
    if not tests:
        raise SetupFailed(f"{recipe.pin.name} {recipe.pin.version} has no tests at {list(recipe.tests)}")
    return Project(recipe.pin.name, recipe.pin.version, recipe.sources, recipe.skip, files, tests)


def _unzip(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as wheel:
        return {n: wheel.read(n) for n in wheel.namelist() if not n.endswith("/")}
