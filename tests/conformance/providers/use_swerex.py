"""SWE-ReX: a deployment, its sessions, commands and files."""
from __future__ import annotations

import tempfile
import time
from pathlib import Path

from cases import PROBE, araises, case, main, prove, running
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from dsec.faces.swerex import DsecDeployment, DsecDeploymentConfig


@case("deployment")
async def deployment() -> None:
    one = DsecDeploymentConfig(env={"A": "b"}, workdir="/srv").get_deployment()
    assert isinstance(one, DsecDeployment)
    await araises(DeploymentNotStartedError, one.is_alive())
    await one.start()
    id = one.sandbox_id
    try:
        assert (await one.is_alive()).is_alive
        prove((await one.runtime.execute(Command(command=PROBE, shell=True))).stdout, id)
        assert (await one.runtime.execute(Command(command="echo $A; pwd", shell=True))).stdout == "b\n/srv\n"
        alive = one.runtime
    finally:
        await one.stop()
    assert id not in running() and not (await alive.is_alive()).is_alive
    await one.stop()
    error = await araises(DeploymentStartupError, DsecDeployment(image="not-there").start())
    assert "layer_not_found" in str(error)


@case("commands and files")
async def commands() -> None:
    one = DsecDeployment()
    await one.start()
    runtime = one.runtime
    try:
        got = await runtime.execute(Command(command=["sh", "-c", "echo out; echo err >&2; exit 4"]))
        assert (got.stdout, got.stderr, got.exit_code) == ("out\n", "err\n", 4)
        assert (await runtime.execute(Command(command="echo a; echo b >&2", shell=True, merge_output_streams=True))).stdout == "a\nb\n"
        assert (await runtime.execute(Command(command="echo $X", shell=True, env={"X": "y"}, cwd="/tmp"))).stdout == "y\n"
        error = await araises(NonZeroExitCodeError, runtime.execute(Command(command="exit 3", shell=True, check=True, error_msg="mine")))
        assert "mine" in str(error) and "3" in str(error)
        await araises(CommandTimeoutError, runtime.execute(Command(command="sleep 60", shell=True, timeout=0.5)))
        await runtime.write_file(WriteFileRequest(path="/tmp/a/b.txt", content="é\r\n"))
        assert (await runtime.read_file(ReadFileRequest(path="/tmp/a/b.txt"))).content == "é\r\n"
        await araises(FileNotFoundError, runtime.read_file(ReadFileRequest(path="/tmp/none")))
        with tempfile.TemporaryDirectory() as here:
            Path(here, "d").mkdir()
            Path(here, "d", "run.sh").write_text("echo uploaded\n")
            Path(here, "d", "run.sh").chmod(0o755)
            await runtime.upload(UploadRequest(source_path=f"{here}/d", target_path="/opt/d"))
            await runtime.upload(UploadRequest(source_path=f"{here}/d/run.sh", target_path="/opt/e/one.sh"))
        assert (await runtime.execute(Command(command="sh -c /opt/d/run.sh; stat -c %a /opt/e/one.sh", shell=True))).stdout == "uploaded\n755\n"
    finally:
        await one.stop()


@case("sessions")
async def sessions() -> None:
    one = DsecDeployment()
    await one.start()
    runtime = one.runtime

    async def run(command: str, **more: object) -> object:
        return await runtime.run_in_session(BashAction(command=command, **more))

    try:
        await runtime.write_file(WriteFileRequest(path="/tmp/rc", content="export FROM_RC=1\necho hello\nPS1='mine> '\n"))
        assert (await runtime.create_session(CreateBashSessionRequest(startup_source=["/tmp/rc"]))).output == "hello\n"
        await araises(SessionExistsError, runtime.create_session(CreateBashSessionRequest()))
        assert (await run("cd /usr; x=5; f() { echo f$1; }; export Y=z; echo $FROM_RC")).output == "1\n"
        got = await run("pwd; echo $x; f 1; python3 -c 'import os; print(os.environ[\"Y\"])'; echo err >&2")
        assert got.output == "/usr\n5\nf1\nz\nerr\n" and got.exit_code == 0, got
        assert (await run("cat <<'EOF'\na $x\nEOF\nfor i in 1 2; do\n echo $i\ndone")).output == "a $x\n1\n2\n"
        assert (await run("printf no-newline")).output == "no-newline"
        assert (await run("false", check="silent")).exit_code == 1 and (await run("(exit 7)", check="ignore")).exit_code is None
        await araises(NonZeroExitCodeError, run("false"))
        await araises(BashIncorrectSyntaxError, run("if true; then"))
        long = "echo " + "x" * 100_000
        assert (await run(long)).output == "x" * 100_000 + "\n"
        # a command that does not end is interrupted, and the shell is as it was
        await araises(CommandTimeoutError, run("echo begun; sleep 300", timeout=1))
        await runtime.run_in_session(BashInterruptAction())
        assert (await run("echo $x; pwd")).output == "5\n/usr\n"
        await araises(CommandTimeoutError, run("trap '' INT; python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(300)'", timeout=1))
        begun = time.monotonic()
        await runtime.run_in_session(BashInterruptAction())
        assert time.monotonic() - begun < 60 and (await run("echo $x")).output == "5\n"
        # an interactive program
        got = await run("python3 -q", is_interactive_command=True, expect=[">>> "], timeout=30)
        assert got.expect_string == ">>> "
        assert (await run("print(6*7)", is_interactive_command=True, expect=[">>> "], timeout=30)).output == "42"
        await run("exit()", is_interactive_quit=True, timeout=30)
        assert (await run("echo $x")).output == "5\n"
        # another one beside it
        await runtime.create_session(CreateBashSessionRequest(session="two"))
        assert (await run("echo [$x]", session="two")).output == "[]\n"
        await runtime.close_session(CloseBashSessionRequest(session="two"))
        await araises(SessionDoesNotExistError, run("true", session="two"))
    finally:
        await one.stop()


main("swe-rex")
