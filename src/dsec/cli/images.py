"""image pull, import, build."""
from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common
from dsec.cli.layers import progress

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.wire import EnvironmentInfo

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Whole images: pull, import and build.")

NAME = typer.Option("--name", metavar="NAME[:TAG]", help="Name of the environment; the image's own when not given.")
PLATFORM = typer.Option("--platform", metavar="OS/ARCH", help="Which image of a multi-platform one.")


@app.command("pull")
def pull(
    reference: Annotated[str, typer.Argument(metavar="REF", help="[REGISTRY/]REPOSITORY[:TAG][@DIGEST]")],
    name: Annotated[str | None, NAME] = None,
    platform: Annotated[str, PLATFORM] = "linux/amd64",
    user: Annotated[str | None, typer.Option("-u", "--user", help="Sign in as this user; the password is read from stdin.")] = None,
    plain_http: Annotated[bool, typer.Option("--plain-http", help="The registry has no TLS.")] = False,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Bring an image from a registry. Without --user, what `podman login` or `docker login` keeps for the registry is used."""
    username, password = (user, sys.stdin.readline().rstrip("\r\n")) if user is not None else saved_login(reference)

    async def work(client: DSecClient) -> EnvironmentInfo:
        with progress(f"image {reference}") as report:
            return await client.images.pull(
                reference, name=name, platform=platform, username=username, password=password, plain_http=plain_http, on_progress=report
            )

    _show(common.call(work), as_json)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="An OCI layout (a directory or a tar) or a `docker save` archive, plain or compressed.")],
    name: Annotated[str | None, NAME] = None,
    image: Annotated[str | None, typer.Option("--image", help="Which image, where there are several.")] = None,
    platform: Annotated[str, PLATFORM] = "linux/amd64",
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Make an environment of an image in files."""
    if not path.exists():
        common.fail(f"file_not_found: there is no {path}", 2)

    async def work(client: DSecClient) -> EnvironmentInfo:
        with progress(f"image {path.name}") as report:
            return await client.images.load(path, name=name, image=image, platform=platform, on_progress=report)

    _show(common.call(work), as_json)


@app.command("build")
def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The context; its .dockerignore is honoured.")],
    tag: Annotated[str, typer.Option("-t", "--tag", metavar="NAME[:TAG]", help="Name of the environment.")],
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The Dockerfile; DIR/Dockerfile when not given.")] = None,
    target: Annotated[str | None, typer.Option(help="Build this stage.")] = None,
    build_arg: Annotated[list[str], typer.Option("--build-arg", metavar="KEY=VALUE")] = [],  # noqa: B006 - typer reads it
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Build an environment from a Dockerfile."""
    dockerfile = file or directory / "Dockerfile"
    if not directory.is_dir():
        common.fail(f"file_not_found: {directory} is not a directory", 2)
    if not dockerfile.is_file():
        common.fail(f"file_not_found: there is no {dockerfile}", 2)
    args = common.pairs(build_arg, "--build-arg")

    async def work(client: DSecClient) -> EnvironmentInfo:
        with progress(f"image {tag}") as report:
            return await client.images.build(tag, directory, dockerfile=dockerfile, target=target, args=args, on_progress=report)

    _show(common.call(work), as_json)


def _show(info: EnvironmentInfo, as_json: bool) -> None:
    if as_json:
        common.show_json(info)
    else:
        print(f"{info.digest}  {len(info.layers)} layers  {info.name}")


def saved_login(reference: str) -> tuple[str | None, str | None]:
    """User and password that a login of another tool keeps for the reference's registry; helpers that keep them elsewhere are not asked."""
    head = reference.partition("/")[0]
    registry = head if "/" in reference and ("." in head or ":" in head or head == "localhost") else "https://index.docker.io/v1/"
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    files = [os.environ.get("REGISTRY_AUTH_FILE"), run and f"{run}/containers/auth.json", str(Path.home() / ".docker" / "config.json")]
    for file in files:
        try:
            kept = json.loads(Path(file).read_bytes())["auths"][registry]["auth"] if file else None
            user, colon, password = base64.b64decode(kept, validate=True).decode().partition(":") if kept else ("", "", "")
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if colon:
            return user, password
    return None, None
