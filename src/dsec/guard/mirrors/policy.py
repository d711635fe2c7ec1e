"""What one sandbox sees of each mirror: a `MirrorPolicy` checked and compiled.

Everything fails closed: what has no date does not exist under a date pin, what has a version that cannot be read does not exist under a
version set.
"""

from __future__ import annotations

import datetime
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from debian.debian_support import Version as DebianVersion
from nodesemver import satisfies, valid_range
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from libdsec.errors import InvalidRequest
from libdsec.mirrors import MirrorPolicy, MirrorRules

MIRRORS = ("pypi", "npm", "debian", "go", "crates")
MOST_NAMES = 10_000  # in one list
MOST_TEXT = 1000  # characters of a name or a set of versions
_RELATION = re.compile(r"(<<|<=|=|>=|>>)\s*([0-9][A-Za-z0-9.+:~-]*)")
_RELATIONS: dict[str, Callable[[DebianVersion, DebianVersion], bool]] = {
    "<<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
    ">=": lambda a, b: a >= b,
    ">>": lambda a, b: a > b,
}
VersionSet = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class View:
    """One mirror as one policy shows it. `key`: equal for equal views, so that what was made for one serves the other."""

    mirror: str
    key: str
    before: float | None
    _allow: re.Pattern[str] | None
    _deny: re.Pattern[str] | None
    _hide: re.Pattern[str] | None
    _versions: dict[str, VersionSet]

    def shows(self, name: str) -> bool:
        """Whether the package exists."""
        known = normal(self.mirror, name)
        if self._hide is not None and self._hide.fullmatch(known):
            return False
        if self._deny is not None and self._deny.fullmatch(known):
            return False
        return self._allow is None or self._allow.fullmatch(known) is not None

    def admits(self, name: str, version: str | None) -> bool:
        """Whether this version of a package that exists does. None: it cannot be told."""
        allowed = self._versions.get(normal(self.mirror, name))
        return allowed is None or (version is not None and allowed(version))

    def dated(self, released: float | None) -> bool:
        """Whether what was released then exists. None: nobody knows when it was."""
        return self.before is None or (released is not None and released <= self.before)

    @property
    def whole(self) -> bool:
        """Nothing is left out."""
        return self.before is None and not self._versions and self._allow is None and self._deny is None and self._hide is None


def compile_policy(policy: MirrorPolicy | None) -> dict[str, View]:
    """A view of every mirror. InvalidRequest names the field that is wrong."""
    policy = policy or MirrorPolicy()
    hidden = [_base(name, "hide") for name in _names(policy.hide, "hide")]
    before = _moment(policy.before, "before")
    return {mirror: _view(mirror, getattr(policy, mirror) or MirrorRules(), hidden, before) for mirror in MIRRORS}


def normal(mirror: str, name: str) -> str:
    """The form in which a mirror takes two spellings of a name for the same."""
    if mirror == "pypi":
        return canonicalize_name(name)
    if mirror == "crates":
        return name.lower().replace("_", "-")
    return name if mirror == "go" else name.lower()


def moment(text: object) -> float | None:
    """Seconds since the epoch of an ISO 8601 time; None when it is none."""
    try:
        found = datetime.datetime.fromisoformat(text if isinstance(text, str) else "")
        return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _view(mirror: str, rules: MirrorRules, hidden: list[str], before: float | None) -> View:
    allow = None if rules.allow is None else _names(rules.allow, f"{mirror}.allow")
    deny = _names(rules.deny, f"{mirror}.deny")
    sets = {}
    for name, text in rules.versions.items():
        (one,) = _names([name], f"{mirror}.versions")
        sets[normal(mirror, one)] = _version_set(mirror, text, f"{mirror}.versions")
    pinned = _moment(rules.before, f"{mirror}.before")
    pin = before if pinned is None else pinned if before is None else min(before, pinned)
    allowed = None if allow is None else sorted(allow)
    # Go tells them apart, the hosts of modules do not: github.com/Pallets/FLASK is the same repository
    blind = re.IGNORECASE if mirror == "go" else re.NOFLAG
    said = msgspec.json.encode([mirror, allowed, sorted(deny), sorted(rules.versions.items()), sorted(hidden), pin])
    return View(
        mirror=mirror,
        key=hashlib.sha256(said).hexdigest()[:16],
        before=pin,
        _allow=None if allow is None else _any(_pattern(mirror, name) for name in allow),
        _deny=_any((_pattern(mirror, name) for name in deny), blind) if deny else None,
        _hide=_any((_disguises(mirror, name) for name in hidden), blind) if hidden else None,
        _versions=sets,
    )


def _any(patterns: Iterable[str], flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)", re.DOTALL | flags)


def _pattern(mirror: str, name: str) -> str:
    """A name or pattern as a regular expression of normal names."""
    plain = re.sub(r"[-_.]+", "-", name).lower() if mirror == "pypi" else normal(mirror, name)
    return fnmatch.translate(plain)


def _disguises(mirror: str, base: str) -> str:
    """Every name that a project of this name may have in a mirror, as a regular expression."""
    name = re.escape(normal(mirror, base))
    if mirror == "npm":
        return rf"(?:@[^/]+/)?{name}"
    if mirror == "debian":  # libraries, bindings and documentation of it; its source package is looked at, too
        around = rf"(?:python3?-|node-|ruby-|lib|librust-|golang-(?:[a-z0-9.-]+-)?|php-){name}[a-z0-9.+]*"
        return rf"(?:{name}|{around})(?:-(?:dev|doc|data|bin|common|utils|tools|dbg|dbgsym|java|perl))?"
    if mirror == "go":  # whoever hosts it: a module path that has it as one of its parts
        return rf"(?:.+/)?{name}(?:\.v\d+|\.git|\.hg|\.bzr|\.svn|\.fossil)?(?:/.*)?"
    return name


def _base(name: str, field: str) -> str:
    """The project's own name, of a name or of where it is hosted."""
    base = name.rstrip("/").removesuffix(".git").rpartition("/")[2]
    if not base:
        raise InvalidRequest(f"{field}: {name[:80]!r} names no project", field=f"mirrors.{field}")
    return base


def _names(names: list[str], field: str) -> list[str]:
    if len(names) > MOST_NAMES:
        raise InvalidRequest(f"{field} has {len(names)} names, at most {MOST_NAMES} are allowed", field=f"mirrors.{field}")
    for name in names:
        if not name or len(name) > MOST_TEXT or not name.isascii() or not name.isprintable() or " " in name:
            raise InvalidRequest(f"{field}: {name[:80]!r} is not a package name", field=f"mirrors.{field}")
    return names


def _moment(text: str | None, field: str) -> float | None:
    if text is None:
        return None
    found = moment(text)
    if found is None:
        raise InvalidRequest(f"{field} is {text[:80]!r}, must be a date or time as in ISO 8601", field=f"mirrors.{field}")
    return found


def _version_set(mirror: str, text: str, field: str) -> VersionSet:
    """Whether a version is in the set. InvalidRequest."""
    try:
        if len(text) > MOST_TEXT:
            raise ValueError(f"longer than {MOST_TEXT} characters")
        if mirror == "pypi":
            return _pep440(SpecifierSet(text))
        if mirror == "debian":
            return _relations(text)
        if valid_range(text, loose=False) is None:
            raise ValueError("no range of semantic versions")
        return _semver(text)
    except (InvalidSpecifier, ValueError) as error:
        raise InvalidRequest(f"{field}: {text[:80]!r}: {error}", field=f"mirrors.{field}") from error


def _pep440(allowed: SpecifierSet) -> VersionSet:
    def holds(version: str) -> bool:
        try:
            return allowed.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False

    return holds


def _semver(text: str) -> VersionSet:
    def holds(version: str) -> bool:
        try:
            return bool(satisfies(version.removeprefix("v").removesuffix("+incompatible"), text, loose=False))
        except ValueError:
            return False

    return holds


def _relations(text: str) -> VersionSet:
    wanted = []
    for part in text.split(","):
        found = _RELATION.fullmatch(part.strip())
        if found is None:
            raise ValueError("relations are <<, <=, =, >= or >> and a version, with commas between")
        wanted.append((_RELATIONS[found[1]], DebianVersion(found[2])))

    def holds(version: str) -> bool:
        try:
            given = DebianVersion(version)
        except ValueError:
            return False
        return all(relation(given, bound) for relation, bound in wanted)

    return holds
