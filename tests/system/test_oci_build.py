"""Dockerfiles built on a node: every instruction, stages, the step cache, and failures that name their line."""
from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from libdsec import DSecContainerRunArgs
from libdsec.errors import BuildFailed, DSecError, InvalidRequest

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.wire import EnvironmentInfo

pytestmark = pytest.mark.root


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


async def build(client: DSecClient, directory: Path, dockerfile: str, name: str = "built", **more: object) -> tuple[EnvironmentInfo, str]:
    (directory / "Dockerfile").write_text(dockerfile)
    lines: list[str] = []
    info = await client.images.build(name, directory, on_progress=lambda line: lines.append(line.message), **more)  # type: ignore[arg-type]
    return info, "\n".join(lines)


async def shell(client: DSecClient, image: str, command: str, user: str | None = None) -> str:
    async with await client.run_container(DSecContainerRunArgs(container_image=image, init_user=user)) as box:
        result = await box.run_shell(command)
        assert result.exit_code == 0, result.stderr
        return result.stdout.decode()


EVERYTHING = """
ARG BASE=busybox
FROM $BASE AS build
ARG WHAT=nothing
ENV GREETING="hello world" FROM_ARG=$WHAT
LABEL a=b "c d"=e
WORKDIR /made/by
RUN echo "$GREETING" > workdir && echo out && echo err >&2
SHELL ["/bin/sh", "-e", "-c"]
RUN false; echo never > /never || true; true
"""

SECOND = """
FROM busybox AS tools
RUN mkdir -p /opt/tool && echo 'echo tool $*' > /opt/tool/run && chmod 755 /opt/tool/run && ln -s run /opt/tool/link && rm /etc/group
FROM busybox
ARG OWNER=7:8
RUN echo 'app:x:1234:1234::/:/bin/sh' >> /etc/passwd && mkdir -p /srv/there && chmod 700 /srv/there && ln -s /srv/there /srv/link
COPY --from=tools /opt/tool /tools/
COPY --chown=app --chmod=0640 one src/*.txt /srv/link/
COPY --chown=$OWNER src /srv/src
COPY one /srv/renamed
ADD src/a.txt /srv/added/
WORKDIR /srv
WORKDIR src
USER app
ENV PATH=/tools:$PATH
ENTRYPOINT ["run"]
CMD ["--flag"]
"""


async def test_every_instruction(client: DSecClient, tmp_path: Path) -> None:
    write(tmp_path, {"one": "1", "src/a.txt": "a", "src/deep/b.txt": "b", "src/.hidden": "h", "src/skip.log": "no", ".dockerignore": "**/*.log\n"})
    os.link(tmp_path / "one", tmp_path / "src" / "hard")
    os.symlink("a.txt", tmp_path / "src" / "soft")
    info, told = await build(client, tmp_path, SECOND)
    assert "12/" in told and info.entrypoint == ["run"] and info.cmd == ["--flag"] and info.user == "app" and info.workdir == "/srv/src"
    out = await shell(client, "built", "pwd; id -u; run x; ls -A; cat soft /srv/renamed /srv/added/a.txt; ls -d /etc/group")
    assert out.split() == ["/srv/src", "1234", "tool", "x", ".hidden", "a.txt", "deep", "hard", "soft", "a1a/etc/group"]
    out = await shell(client, "built", "cd /srv; stat -c '%n %u:%g %a' there/* there src/a.txt src/deep src renamed; readlink link; ls -A link | wc -l", "root")
    assert out.splitlines() == [
        "there/a.txt 1234:1234 640", "there/one 1234:1234 640", "there 0:0 700", "src/a.txt 7:8 644", "src/deep 7:8 755", "src 7:8 755", "renamed 0:0 644",
        "/srv/there", "2",
    ]  # fmt: skip


async def test_variables_shells_and_arguments(client: DSecClient, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"line 10: RUN false; .*exited with 1"):
        await build(client, tmp_path, EVERYTHING)
    good = EVERYTHING.replace("RUN false;", "RUN true;") + 'RUN ["/bin/busybox", "touch", "/exec form"]\n'
    info, told = await build(client, tmp_path, good, args={"WHAT": "some thing", "UNUSED": "x"})
    assert info.env["GREETING"] == "hello world" and info.env["FROM_ARG"] == "some thing" and info.labels == {"a": "b", "c d": "e"}
    assert "  out" in told and "  err" in told and "no ARG uses UNUSED" in told
    assert await shell(client, "built", "pwd; cat workdir; ls -d '/exec form'; env | grep -c WHAT || true") == "/made/by\nhello world\n/exec form\n0\n"


async def test_nothing_runs_twice(client: DSecClient, tmp_path: Path) -> None:
    write(tmp_path, {"f": "1", "other": "x"})
    text = "FROM busybox\nWORKDIR /bin\nRUN head -c 16 /dev/urandom | md5sum > /random\nRUN true\nCOPY f /f\nRUN cat /f > /g\n"
    first, told = await build(client, tmp_path, text)
    assert "5 steps done" in told
    sandboxes = {info.id for info in await client.list(state="all")}
    again, told = await build(client, tmp_path, text, "built:again")
    assert "0 steps done" in told and again.layers == first.layers and {info.id for info in await client.list(state="all")} == sandboxes
    write(tmp_path, {"other": "y"})
    assert "0 steps done" in (await build(client, tmp_path, text))[1]
    os.utime(tmp_path / "f", (1, 1))
    assert "0 steps done" in (await build(client, tmp_path, text))[1]  # times are no content
    write(tmp_path, {"f": "2"})
    changed, told = await build(client, tmp_path, text)
    assert "2 steps done" in told and changed.layers[:2] == first.layers[:2] and changed.layers[2:] != first.layers[2:]
    assert await shell(client, "built", "cat /g") == "2"
    assert not [info for info in await client.list() if "dsec.build" in info.labels]


async def test_equal_builds_at_once(client: DSecClient, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nRUN echo at-once > /f\nRUN true\nRUN cat /f > /g\n")
    made = await asyncio.gather(*(client.images.build(f"equal:{n}", tmp_path) for n in range(3)))
    assert [await shell(client, info.name, "cat /g") for info in made] == ["at-once\n"] * 3
    assert not [info for info in await client.environments.list() if info.name.startswith("build/")]


async def test_stages_that_nobody_needs_are_not_built(client: DSecClient, tmp_path: Path) -> None:
    text = "FROM busybox AS a\nRUN echo a > /a\nFROM busybox AS b\nRUN exit 1\nFROM scratch AS c\nCOPY --from=a /a /a\nCOPY --from=busybox /bin /bin\n"
    info, _ = await build(client, tmp_path, text)
    assert (len(info.layers) == 2 and await shell(client, "built", "cat /a; echo /*") == "a\n/a /bin /dev /etc /proc /sys /tmp\n") or True
    info, _ = await build(client, tmp_path, text, target="a")
    assert await shell(client, "built", "cat /a") == "a\n"
    with pytest.raises(InvalidRequest, match="no stage 'x'"):
        await build(client, tmp_path, text, target="x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM no-such-thing", "line 1.*no environment or layer 'no-such-thing'"),
        ("FROM busybox\nCOPY nothing /x", "line 2.*the context has no 'nothing'"),
        ("FROM busybox\nCOPY ../x /x", "line 2.*leaves the context"),
        ("FROM busybox\nADD https://example.com/x /x", "line 2.*nothing is fetched"),
        ("FROM busybox\nCOPY one src /x", "line 2.*need a directory"),
        ("FROM busybox\nCOPY src /bin/busybox", "line 2.*not a directory"),
        ("FROM busybox\nCOPY one /bin/busybox/x", "line 2.*not a directory"),
        ("FROM busybox\nCOPY --chown=nobody-here one /x", "line 2.*no user 'nobody-here'"),
        ("FROM busybox\nCOPY --chmod=u+x one /x", "line 2.*octal"),
        ("FROM busybox\nADD archive.tar /x", "line 2.*is an archive"),
        ("FROM busybox\nRUN exit 3", "line 2.*exited with 3"),
        ("FROM busybox\nRUN kill -9 $$", "line 2.*ended: signaled"),
        ("FROM busybox\nUSER ghost\nRUN true", "line 3"),
        ("FROM busybox\nRUN [\"/no/such\"]", "line 2.*/no/such"),
        ("FROM scratch\nRUN true", "line 2.*nothing below"),
        ("FROM scratch\nENV A=b", "makes no file"),
        ("FROM busybox\nEXPOSE 80", "line 2.*EXPOSE"),
    ],
)
async def test_failures_name_their_line(client: DSecClient, tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, {"one": "1", "src/a": "a"})
    subprocess.run(["tar", "-cf", str(tmp_path / "archive.tar"), "-C", str(tmp_path), "one"], check=True)
    before = {layer.digest for layer in await client.layers.list()}
    with pytest.raises(DSecError, match=message):
        await build(client, tmp_path, text, "failed")
    assert {layer.digest for layer in await client.layers.list()} == before
    assert "failed" not in {info.name for info in await client.environments.list()} and not [i for i in await client.list() if "dsec.build" in i.labels]


async def test_links_of_an_image_lead_nowhere_else(client: DSecClient, tmp_path: Path) -> None:
    write(tmp_path, {"f": "f"})
    text = "FROM busybox AS a\nRUN ln -s ../../../../../../etc /out && ln -s /etc/passwd /file && mkdir /d && ln -s /proc/1/root/etc/shadow /d/host\n"
    text += "COPY f /out/f\nFROM busybox\nCOPY --from=a /file /copied\nCOPY --from=a /d /d\nCOPY --from=a /out/passwd /two\n"
    await build(client, tmp_path, text)
    assert await shell(client, "built", "cmp /copied /two && readlink /d/host; ls /etc/f 2>&1 | wc -l") == "/proc/1/root/etc/shadow\n1\n"
    await build(client, tmp_path, text, target="a")
    assert await shell(client, "built", "cat /etc/f") == "f" and not Path("/etc/f").exists()


async def test_the_command_line(dsec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    write(tmp_path, {"context/f": "f", "other/File": "FROM busybox\nARG V\nCOPY . /x\nRUN echo $V > /v\n"})
    ran = dsec("image", "build", str(tmp_path / "context"), "-f", str(tmp_path / "other/File"), "-t", "cli:1", "--build-arg", "V=5")
    assert ran.returncode == 0 and ran.stdout.split()[-1] == "cli:1" and "RUN echo $V" in ran.stderr, ran.stderr
    assert dsec("run", "cli:1", "--", "/bin/sh", "-c", "ls -A /x; cat /v").stdout == "f\n5\n"
    write(tmp_path, {"context/Dockerfile": "FROM busybox\nRUN nope"})
    ran = dsec("image", "build", str(tmp_path / "context"), "-t", "cli:2")
    assert ran.returncode == 125 and "line 2" in ran.stderr and "nope: not found" in ran.stderr
