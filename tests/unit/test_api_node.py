"""The node's start: its key, its locks, and the addresses that it refuses."""
from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from tests.unit.api_fake import KEY, api

from dsec.config import Config, load
from dsec.edge.config import MIB
from dsec.node import CannotStart, _listen, _listen_unix, _lock, _ready, _tls, api_key, edge_config, main
from libdsec import DSecClient, DSecContainerRunArgs, errors


def config(tmp_path: Path, **flags: str) -> Config:
    return load(env={}, flags={"state_dir": str(tmp_path / "state"), "run_dir": str(tmp_path / "run"), **flags}).config


def test_the_key_is_made_once_and_for_us_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "api.key"
    key = api_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(key) > 32 and api_key(path) == key
    path.chmod(0o640)
    with pytest.raises(CannotStart, match="chmod 600"):
        api_key(path)
    path.chmod(0o600)
    for content in ("", "short", "with spaces in the middle of it"):
        path.write_text(content)
        with pytest.raises(CannotStart, match=r"api\.key"):
            api_key(path)
    with pytest.raises(CannotStart, match="cannot"):
        api_key(path / "below-a-file")


def test_one_node_for_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "node.lock"
    with _lock(path, "state directory"):
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(CannotStart, match=f"pid {os.getpid()}"), _lock(path, "state directory"):
            pass
    with _lock(path, "state directory"):
        pass


def test_where_it_listens(tmp_path: Path) -> None:
    with _listen(config(tmp_path, listen="127.0.0.1:0"), tls=False) as sock:
        port = sock.getsockname()[1]
        sock.listen()
        with pytest.raises(CannotStart, match=f"127.0.0.1:{port}: .*in use"):
            _listen(config(tmp_path, listen=f"127.0.0.1:{port}"), tls=False)
    for address in ("0.0.0.0:0", "[::]:0"):
        checked = Config(listen=address)  # past the configuration's own check
        with pytest.raises(CannotStart, match="needs TLS"):
            _listen(checked, tls=False)
    with _listen(Config(listen="0.0.0.0:0"), tls=True):
        pass
    with pytest.raises(CannotStart, match=r"no\.such\.host\.invalid"):
        _listen(Config(listen="no.such.host.invalid:1"), tls=True)


def test_the_local_socket_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    for _ in range(2):  # one that was left behind is replaced
        with _listen_unix(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    with pytest.raises(CannotStart, match=r"cannot listen on .*node\.sock"):
        _listen_unix(tmp_path / ("x" * 120) / "node.sock")


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert _tls(Config()) is None
    with pytest.raises(CannotStart, match=r"cert\.pem"):
        _tls(Config(tls_cert=str(cert), tls_key=str(key)))
    cert.write_text("nothing")
    key.write_text("nothing")
    with pytest.raises(CannotStart, match=r"cert\.pem"):
        _tls(Config(tls_cert=str(cert), tls_key=str(key)))


async def test_the_api_over_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl: not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    async with api(tmp_path) as made:
        sock = _listen(Config(listen="127.0.0.1:0"), tls=True)
        url = f"https://127.0.0.1:{sock.getsockname()[1]}"
        await made.server.serve(sock, _tls(Config(tls_cert=str(cert), tls_key=str(key))))
        async with DSecClient(url, KEY, ca_file=str(cert)) as client:
            box = await client.run_container(DSecContainerRunArgs(container_image="base", memory_limit_mb=16))
            assert (await box.exec(["echo", "x" * 3000])).stdout == b"x" * 3000
        with pytest.raises(errors.ConnectionFailed) as caught:
            await DSecClient(url, KEY).open()
        assert caught.value.details["sent"] is False and "certificate" in caught.value.message.lower()


def test_it_says_when_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    made = config(tmp_path, listen="127.0.0.1:0")
    with _listen(made, tls=False) as sock:
        with _ready(made, sock, False, "1") as url:
            assert url == f"http://127.0.0.1:{sock.getsockname()[1]}" and (tmp_path / "run" / "node.json").exists()
        assert not (tmp_path / "run" / "node.json").exists()


def test_what_the_edge_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_AETHER", "/x/aether")
    told = edge_config(config(tmp_path, **{"node.medium_size_mb": "5", "sandbox.idle_timeout": "7", "node.prefix": "abcd"}))
    assert (told.medium_bytes, told.idle_timeout, told.max_lifetime, told.prefix) == (5 * MIB, 7, None, "abcd")
    assert told.state_dir == tmp_path / "state" and str(told.aether) == "/x/aether"


def test_a_bad_setting_is_said_and_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "listen=0.0.0.0:1"]) == 1 and "needs TLS" in capsys.readouterr().err
    assert main(["--set", "nothing=1"]) == 1 and "unknown key 'nothing'" in capsys.readouterr().err
