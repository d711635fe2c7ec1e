"""Upstreams as this machine's own clients know them: pip, npm, apt, Go and cargo configuration, read at the start of a node."""

from __future__ import annotations

import configparser
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

PUBLIC = {
    "pypi": "https://pypi.org/simple/",
    "npm": "https://registry.npmjs.org/",
    "go": "https://proxy.golang.org/",
    "crates": "https://index.crates.io/",
}


def upstream(mirror: str, home: Path, env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Where this machine gets the packages of that mirror; the public one when its settings name none. Empty: nowhere, for Debian without
    sources."""
    found = {"pypi": _pip, "npm": _npm, "debian": _apt, "go": _go, "crates": _cargo}[mirror](home, env, root)
    return found or PUBLIC.get(mirror, "")


def _pip(home: Path, env: Mapping[str, str], root: Path) -> str | None:
    if env.get("PIP_INDEX_URL"):
        return env["PIP_INDEX_URL"]
    places = [home / ".config/pip/pip.conf", home / ".pip/pip.conf", root / "etc/pip.conf"]
    if env.get("PIP_CONFIG_FILE"):
        places.insert(0, Path(env["PIP_CONFIG_FILE"]))
    for place in places:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(place.read_text())
        except (OSError, configparser.Error):
            continue
        if parser.has_option("global", "index-url"):
            return parser.get("global", "index-url").strip()
    return None


def _npm(home: Path, env: Mapping[str, str], root: Path) -> str | None:
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if env.get(name):
            return env[name]
    for place in (home / ".npmrc", root / "etc/npmrc", root / "usr/etc/npmrc", root / "usr/local/etc/npmrc"):
        if (found := _first(place, r"^\s*registry\s*=\s*[\"']?(\S+?)[\"']?\s*$")) is not None:
            return found
    return None


def _apt(home: Path, env: Mapping[str, str], root: Path) -> str | None:
    """As `archives_of` reads it."""
    etc = root / "etc/apt"
    found = []
    for place in sorted([etc / "sources.list", *(etc / "sources.list.d").glob("*.list")]):
        for line in _lines(place):
            match = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(https?://\S+)\s+(\S+)\s+(\S.*)$", line)
            if match is not None:
                found.append(f"{match[1]} {match[2]} {match[3].partition('#')[0].strip()}")
    for place in sorted((etc / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", "\n".join(_lines(place))):
            said = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in stanza.splitlines())}
            if "deb" not in said.get("types", "").split() or said.get("enabled", "yes").lower() == "no":
                continue
            for uri in said.get("uris", "").split():
                found += [f"{uri} {suite} {said['components']}" for suite in said.get("suites", "").split() if said.get("components")]
    return "; ".join(one for one in found if re.match(r"https?://\S+ [a-z0-9][a-z0-9./-]* [a-z]", one))


def _go(home: Path, env: Mapping[str, str], root: Path) -> str | None:
    said = env.get("GOPROXY") or _first(home / ".config/go/env", r"^GOPROXY=(\S+)$") or ""
    return next((word for word in re.split(r"[,|]", said) if word.startswith(("http://", "https://"))), None)


def _cargo(home: Path, env: Mapping[str, str], root: Path) -> str | None:
    cargo = Path(env.get("CARGO_HOME") or home / ".cargo")
    for place in (cargo / "config.toml", cargo / "config"):
        try:
            sources = tomllib.loads(place.read_text()).get("source", {})
        except (OSError, tomllib.TOMLDecodeError):
            continue
        name, seen = "crates-io", set()
        while isinstance(sources.get(name), dict) and name not in seen:
            seen.add(name)
            registry = sources[name].get("registry", "")
            if registry.startswith("sparse+"):
                return str(registry.removeprefix("sparse+"))
            name = sources[name].get("replace-with", "")
    return None


def _lines(place: Path) -> list[str]:
    try:
        return [line for line in place.read_text().splitlines() if not line.lstrip().startswith("#")]
    except OSError:
        return []


def _first(place: Path, pattern: str) -> str | None:
    return next((match[1] for line in _lines(place) if (match := re.match(pattern, line)) is not None), None)
