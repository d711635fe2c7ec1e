"""`dsec fn`: function calls and the judge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, FnResult
    from libdsec.fncall import LanguageInfo

app = typer.Typer(no_args_is_help=True, help="Function calls: short work in a box that nothing was in before.")

Image = Annotated[str, typer.Argument(help="Environment, layer or digest.")]
Source = Annotated[Path, typer.Argument(help="The source; `-` is standard input.", allow_dash=True)]
_SUFFIXES = {".py": "python", ".c": "c", ".cpp": "cpp", ".cc": "cpp", ".java": "java", ".go": "go", ".rs": "rust", ".js": "javascript"}


@app.command("run")
def run(
    image: Image,
    source: Source,
    argv: Annotated[list[str] | None, typer.Argument(help="Its arguments, after `--`.", show_default=False)] = None,
    kind: Annotated[
        str | None, typer.Option(help="python, shell, or a language of the judge.  [default: by the name of the source]")
    ] = None,
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="Pass standard input on.")] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="End it after so long (exit status 124).")] = None,
    cpu: Annotated[float | None, typer.Option(metavar="SECONDS", help="Limit of CPU time.")] = None,
    memory: Annotated[int | None, typer.Option(metavar="MB", help="Memory limit.")] = None,
    file: Annotated[list[Path], typer.Option("-f", "--file", help="A file that it finds beside it.")] = [],  # noqa: B006 - typer reads it
    env: Annotated[list[str], typer.Option("-e", "--env", metavar="KEY=VALUE")] = [],  # noqa: B006
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Run one call. Ends with its exit status; 125 is an error of the platform, 1 a source that does not compile."""
    from libdsec import FnCallArgs, FnLimits

    code = _read(source)
    language = kind or ("shell" if source.suffix == ".sh" else _SUFFIXES.get(source.suffix, "python"))
    compiled = language not in ("python", "shell")
    args = FnCallArgs(
        image=image, kind="compile_run" if compiled else language, code=code, language=language if compiled else None, argv=argv or [],
        stdin=sys.stdin.buffer.read() if interactive else b"", files={path.name: path.read_bytes() for path in file},
        env=common.pairs(env, "--env"), limits=FnLimits(wall=timeout, cpu=cpu, memory_mb=memory),
    )  # fmt: skip

    async def work(client: DSecClient) -> FnResult:
        return await client.run_fncall(args)

    result = common.call(work)
    if as_json:
        common.show_json(result)
        return
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    raise typer.Exit(_status(result))


@app.command("judge")
def judge(
    image: Image,
    source: Source,
    cases: Annotated[
        Path, typer.Argument(help="A directory of NAME.in with NAME.out or NAME.ans beside each.", exists=True, file_okay=False)
    ],
    language: Annotated[str | None, typer.Option(help="[default: by the name of the source]")] = None,
    time: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of CPU time of a case.")] = 1.0,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 256,
    checker: Annotated[str, typer.Option(help="tokens, lines, exact or float; or a source.")] = "tokens",
    interactor: Annotated[Path | None, typer.Option(help="The source of a program that talks to the submission.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Judge a submission. Ends with 0 when it is accepted, else with 1."""
    from libdsec import Case, FnCallArgs, JudgeSpec, Tool, Verdict

    found = []
    for path in sorted(cases.glob("*.in")):
        answer = next((beside.read_bytes() for end in (".out", ".ans") if (beside := path.with_suffix(end)).is_file()), None)
        found.append(Case(name=path.stem, stdin=path.read_bytes(), answer=answer))
    if not found:
        common.fail(f"invalid_request: no *.in in {cases}", 2)
    program = Path(checker) if checker not in ("tokens", "lines", "exact", "float") else None
    spec = JudgeSpec(
        language=language or _language(source), cases=found, time_limit=time, memory_mb=memory, checker="tokens" if program else checker,
        checker_program=Tool(language=_language(program), code=_read(program)) if program else None,
        interactor=Tool(language=_language(interactor), code=_read(interactor)) if interactor else None,
    )  # fmt: skip
    args = FnCallArgs(image=image, kind="judge", code=_read(source), judge=spec)

    async def work(client: DSecClient) -> FnResult:
        return await client.run_fncall(args)

    result = common.call(work)
    assert result.judge is not None
    if as_json:
        common.show_json(result)
    else:
        if result.compile is not None and not result.compile.ok:
            common.say(result.compile.output.rstrip())
        rows = (
            (
                case.name,
                case.verdict,
                f"{case.usage.cpu:.3f}" if case.usage else "-",
                common.size(case.usage.memory_peak) if case.usage else "-",
                case.message[:60],
            )
            for case in result.judge.cases
        )
        common.show_table(("case", "verdict", "cpu s", "memory", "message"), rows)
        print(f"{result.judge.verdict} ({result.judge.status}), {result.judge.score:g} of {result.judge.of:g}")
    raise typer.Exit(0 if result.verdict is Verdict.AC else 1)


@app.command("languages")
def languages(image: Image, as_json: Annotated[bool, common.JSON] = False) -> None:
    """The judge's languages, and which of them an environment has."""

    async def work(client: DSecClient) -> list[LanguageInfo]:
        return await client.languages(image)

    listed = common.call(work)
    if as_json:
        common.show_json(listed)
        return
    common.show_table(
        ("language", "title", "there", "version"), ((one.name, one.title, "yes" if one.present else "no", one.version) for one in listed)
    )


def _read(source: Path) -> str:
    try:
        return sys.stdin.read() if str(source) == "-" else source.read_text()
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"invalid_request: {source}: {error}", 2)


def _language(source: Path) -> str:
    language = _SUFFIXES.get(source.suffix)
    if language is None:
        common.fail(f"invalid_request: the language of {source} is not known by its name: {' '.join(_SUFFIXES)}", 2)
    return language


def _status(result: FnResult) -> int:
    from libdsec import Ending

    if result.compile is not None and not result.compile.ok:
        common.say(result.compile.output.rstrip())
        return 1
    if result.ending is Ending.TIMEOUT:
        common.say(f"dsec: it ran into its limit of {' and '.join(result.limits_hit)} time")
        return common.TIMEOUT
    if result.ending is Ending.OOM:
        common.say("dsec: it was killed at its memory limit")
        return 137
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 9)
