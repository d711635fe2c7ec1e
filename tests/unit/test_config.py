"""dsec.toml < environment < flag: precedence, origins, and what is refused."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsec.config import Config, ConfigError, assignments, candidates, from_argv, keys, load, render, to_argv, value, variable


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dsec.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    loaded = load(env={"HOME": "/nowhere"})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.key_path == Path("/var/lib/dsec/api.key") and loaded.config.log_dir == Path("/var/lib/dsec/log")
    assert loaded.config.address == ("127.0.0.1", 7432)


def test_precedence_and_origin(tmp_path: Path) -> None:
    path = write(tmp_path, 'state_dir = "/file"\nlisten = "127.0.0.1:1"\n[node]\nmax_sandboxes = 5\nwarn_sandboxes = 4\n')
    loaded = load(path, env={"DSEC_LISTEN": "127.0.0.1:2", "DSEC_NODE_MAX_SANDBOXES": "6"}, flags={"listen": "127.0.0.1:3", "run_dir": None})
    assert (loaded.config.state_dir, loaded.config.listen, loaded.config.node.max_sandboxes) == ("/file", "127.0.0.1:3", 6)
    assert loaded.origins["state_dir"] == f"file {path}"
    assert loaded.origins["listen"] == "flag"
    assert loaded.origins["node.max_sandboxes"] == "environment DSEC_NODE_MAX_SANDBOXES"
    assert loaded.origins["run_dir"] == "default"
    assert ("listen", "127.0.0.1:3", "flag") in render(loaded)


def test_search_order(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config" / "dsec").mkdir(parents=True)
    (home / ".config" / "dsec" / "dsec.toml").write_text('run_dir = "/home-file"\n')
    env = {"HOME": str(home)}
    assert candidates(env)[0] == Path("/etc/dsec/dsec.toml")
    if not candidates(env)[0].exists():
        assert load(env=env).config.run_dir == "/home-file"
    named = write(tmp_path, 'run_dir = "/named"\n')
    assert load(env=env | {"DSEC_CONFIG": str(named)}).config.run_dir == "/named"
    assert load(named, env=env | {"DSEC_CONFIG": "/no/such"}).config.run_dir == "/named"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope = 1", "unknown key 'nope'"),
        ("[node]\nmax = 1", "unknown key 'node.max'"),
        ("[nodes]\nmax_sandboxes = 1", "unknown key 'nodes'"),
        ("node = 3", "[node] must be a table"),
        ("listen = 7432", "listen = 7432: Expected `str`"),
        ('[node]\nmax_sandboxes = "5"', "node.max_sandboxes"),
        ("[node]\nmax_sandboxes = 0", "node.max_sandboxes = 0: Expected `int` >= 1"),
        ('[log]\nlevel = "loud"', "log.level"),
        ("listen = ", "is not TOML"),
        ('state_dir = "relative"', "must be an absolute path"),
        ('run_dir = ""', "must be an absolute path"),
        ('listen = "localhost"', "must be host:port"),
        ('listen = "127.0.0.1:70000"', "must be host:port"),
        ('listen = "0.0.0.0:7432"', "needs TLS"),
        ('listen = "[::]:7432"', "needs TLS"),
        ('listen = "box.example:7432"', "needs TLS"),
        ('tls_cert = "/c.pem"', "tls_cert and tls_key go together"),
        ("[node]\nmax_sandboxes = 5\nwarn_sandboxes = 6", "is above node.max_sandboxes"),
    ],
)
def test_refused_with_key_and_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(path, env={})
    assert str(path) in str(caught.value)


def test_refused_environment_and_flag() -> None:
    with pytest.raises(ConfigError, match="environment DSEC_NODE_MAXSANDBOXES: unknown variable"):
        load(env={"DSEC_NODE_MAXSANDBOXES": "3"})
    with pytest.raises(ConfigError, match=r"environment DSEC_LISTEN: listen = 'x'"):
        load(env={"DSEC_LISTEN": "x"})
    with pytest.raises(ConfigError, match="flag: unknown key 'nope'"):
        load(env={}, flags={"nope": "1"})
    with pytest.raises(ConfigError, match="must be KEY=VALUE"):
        assignments(["listen"])
    with pytest.raises(ConfigError, match="/no/such/dsec.toml"):
        load("/no/such/dsec.toml", env={})


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("memory.swap", "bogus", "must be one of auto, file, zram, off"),
        ("sandbox.cpu_class", "fast", "must be one of latency, best_effort"),
        ("pool.images", "base", "must be IMAGE=SIZE IMAGE=SIZE"),
    ],
)
def test_what_is_allowed_is_said(key: str, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"flag: {key} = {given!r}: {message}") + "$"):
        load(env={}, flags={key: given})


def test_tls_allows_any_address() -> None:
    loaded = load(env={}, flags={"listen": "[::]:7432", "tls_cert": "/c", "tls_key": "/k"})
    assert loaded.config.address == ("::", 7432)


def test_every_key_has_its_own_variable_and_round_trips() -> None:
    names = [variable(key) for key, _ in keys()]
    assert len(set(names)) == len(names)
    flags = {key: value(Config(), key) for key, _ in keys()}
    assert from_argv(to_argv(None, flags)).config == Config()


def test_manual_lists_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    missing = [key for key, _ in keys() if f"`{key}`" not in page]
    assert not missing
