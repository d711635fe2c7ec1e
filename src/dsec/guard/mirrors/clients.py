"""The ordinary settings by which clients inside find the mirrors: environment variables, and files where a client has no variable."""

from __future__ import annotations

from collections.abc import Callable, Collection
from urllib.parse import urlsplit

APT_CONFIG = "/run/mirrors/apt.conf"
APT_SOURCES = "/run/mirrors/debian.sources"
CARGO_CONFIG = "/run/mirrors/cargo.toml"  # cargo reads it by `--config`; it has no variable for it


def environment(mirrors: Collection[str], url: Callable[[str], str]) -> dict[str, str]:
    """Variables for these mirrors. `url`: where one is, without a slash at its end."""
    env: dict[str, str] = {}
    if "pypi" in mirrors:
        index = f"{url('pypi')}/simple/"
        env |= {"PIP_INDEX_URL": index, "PIP_TRUSTED_HOST": urlsplit(index).hostname or "", "UV_DEFAULT_INDEX": index}
        env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if "npm" in mirrors:
        env |= {"npm_config_registry": f"{url('npm')}/", "npm_config_audit": "false", "npm_config_update_notifier": "false"}
    if "go" in mirrors:
        env |= {"GOPROXY": url("go"), "GOSUMDB": "off", "GOTOOLCHAIN": "local"}
    if "debian" in mirrors:
        env["APT_CONFIG"] = APT_CONFIG
    return env


def files(mirrors: Collection[str], url: Callable[[str], str], sources: str) -> dict[str, str]:
    """Files for these mirrors, by path. `sources`: of apt, as deb822."""
    made: dict[str, str] = {}
    if "debian" in mirrors:
        made[APT_CONFIG] = f'Dir::Etc::SourceList "{APT_SOURCES}";\nDir::Etc::SourceParts "/dev/null";\nAcquire::Languages "none";\n'
        made[APT_SOURCES] = sources
    if "crates" in mirrors:
        made[CARGO_CONFIG] = f'[source.crates-io]\nreplace-with = "mirror"\n[source.mirror]\nregistry = "sparse+{url("crates")}/"\n'
    return made
