"""C01-C07: shell, stdin, environment, working directory, sessions, PID 1 (rules 1-5)."""
from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from libdsec import DSecClient, Ending, Sandbox, errors

from .conftest import MakeBox

HEREDOC = "cat << 'EOF' > t\nhello world\nEOF\ncat t"


async def test_c01_heredoc_plain(box: Sandbox) -> None:
    started = time.monotonic()
    result = await box.run_shell(HEREDOC, cwd="/tmp", timeout=10)
    assert result.stdout == b"hello world\n" and result.exit_code == 0
    assert time.monotonic() - started < 2


@pytest.mark.capability("sessions")
async def test_c01_heredoc_in_session(box: Sandbox) -> None:
    async with await box.session("s") as session:
        started = time.monotonic()
        result = await session.run("cd /tmp\n" + HEREDOC, timeout=10)
        assert result.stdout == b"hello world\n" and result.exit_code == 0
        assert time.monotonic() - started < 2


@pytest.mark.capability("sessions")
@pytest.mark.parametrize("text", ["cat << 'EOF'\nnever closed", "echo 'never closed", 'echo "never closed', "if true; then echo", "echo $(("])
async def test_c01_unterminated_input_does_not_swallow_the_next_call(box: Sandbox, text: str) -> None:
    plain = await box.run_shell(text, timeout=5)
    assert plain.ending in (Ending.EXITED, Ending.TIMEOUT)
    assert (await box.run_shell("echo next")).stdout == b"next\n"
    async with await box.session("s") as session:
        first = await session.run(text, timeout=5)
        assert first.ending in (Ending.EXITED, Ending.TIMEOUT)
        assert (await session.run("echo next", timeout=5)).stdout == b"next\n"


@pytest.mark.capability("sessions")
async def test_c02_no_stdin_means_end_of_file(box: Sandbox) -> None:
    started = time.monotonic()
    assert (await box.run_shell("cat; echo eof", timeout=10)).stdout == b"eof\n"
    background = await box.start(shell="cat; echo eof", timeout=10)
    assert (await background.wait()).stdout == b"eof\n"
    async with await box.session("s") as session:
        assert (await session.run("cat; echo eof", timeout=10)).stdout == b"eof\n"
    assert time.monotonic() - started < 5


async def test_c03_stdin_is_verbatim(box: Sandbox) -> None:
    text = "$HOME `whoami` 'single' \"double\" \\backslash\n"
    assert (await box.exec(["cat"], stdin=text)).stdout.decode() == text
    every = bytes(range(256))
    assert (await box.exec(["sha256sum"], stdin=every)).stdout.split()[0].decode() == hashlib.sha256(every).hexdigest()
    assert (await box.exec(["wc", "-c"], stdin=b"x" * (50 << 20), timeout=120)).stdout.strip() == b"52428800"
    empty = await box.exec(["cat"], stdin="")
    assert empty.stdout == b"" and empty.exit_code == 0


async def test_c03_stdin_to_a_program_that_does_not_read_it(box: Sandbox) -> None:
    result = await box.exec(["true"], stdin=b"x" * (4 << 20), timeout=30)
    assert result.exit_code == 0


async def test_c04_image_environment_applies_as_docker_run_does(client: DSecClient, make_box: MakeBox, app_image: str) -> None:
    """`app_image`: ENV PATH=/opt/x/bin:$PATH, FOO=bar, USER app, WORKDIR /srv."""
    box = await make_box(container_image=app_image, init_user=None)
    result = await box.run_shell("echo $PATH $FOO; id -un; pwd")
    path, user, cwd = result.stdout.decode().splitlines()
    assert path.split(" ")[0].startswith("/opt/x/bin:") and path.endswith(" bar")
    assert (user, cwd) == ("app", "/srv")
    again = await box.run_shell("echo $FOO; id -un; pwd", env={"FOO": "z"}, user="root", cwd="/")
    assert again.stdout.decode().splitlines() == ["z", "root", "/"]
    direct = await box.exec(["sh", "-c", 'echo "$HOME $USER"'])
    assert direct.stdout == b"/home/app app\n"


async def test_c04_no_platform_variables(box: Sandbox) -> None:
    names = {line.split("=")[0] for line in (await box.exec(["env"])).stdout.decode().splitlines()}
    assert names <= {"PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "LANG", "LC_ALL"}, names


async def test_c05_missing_working_directory_is_named(make_box: MakeBox, box: Sandbox) -> None:
    with pytest.raises(errors.CwdNotFound, match="/no/such/dir"):
        await make_box(workdir="/no/such/dir")
    with pytest.raises(errors.CwdNotFound, match="/no/such/dir"):
        await box.run_shell("echo hello", cwd="/no/such/dir")
    with pytest.raises(errors.CwdNotFound, match="/etc/passwd"):
        await box.run_shell("echo hello", cwd="/etc/passwd")


async def test_missing_binary_and_user_have_their_own_codes(box: Sandbox) -> None:
    with pytest.raises(errors.BinaryNotFound, match="no-such-program"):
        await box.exec(["no-such-program"])
    with pytest.raises(errors.NotExecutable, match="/etc/passwd"):
        await box.exec(["/etc/passwd"])
    with pytest.raises(errors.UserNotFound, match="nosuchuser"):
        await box.exec(["true"], user="nosuchuser")
    with pytest.raises(errors.InvalidRequest):
        await box.exec([])


@pytest.mark.capability("sessions")
async def test_c06_one_stuck_command_blocks_nothing(box: Sandbox) -> None:
    s1, s2 = await box.session("s1"), await box.session("s2")
    stuck = asyncio.create_task(s1.run("sleep 1000", timeout=3))
    await asyncio.sleep(0.3)
    queued = asyncio.create_task(s1.run("echo ok", timeout=10))
    started = time.monotonic()
    assert (await s2.run("echo ok")).stdout == b"ok\n"
    assert (await box.run_shell("echo ok")).stdout == b"ok\n"
    assert time.monotonic() - started < 1
    assert (await stuck).ending == Ending.TIMEOUT
    assert (await queued).stdout == b"ok\n"
    assert (await s1.run("echo ok")).stdout == b"ok\n"


@pytest.mark.capability("sessions")
async def test_sessions_keep_state_and_do_not_share_it(box: Sandbox) -> None:
    a, b = await box.session("a"), await box.session("b")
    await a.run("export X=1; y=2; cd /tmp; f() { echo from f $1; }")
    assert (await a.run("echo $X $y $PWD; f 3")).stdout == b"1 2 /tmp\nfrom f 3\n"
    assert (await b.run("echo [$X] $PWD")).stdout.startswith(b"[] ")
    big = "echo " + "x" * 100_000
    assert len((await a.run(big)).stdout) == 100_001
    left = await a.run("exit 3")
    assert left.exit_code == 3 and left.ending == Ending.EXITED
    assert (await b.run("echo still here")).stdout == b"still here\n"


@pytest.mark.capability("sessions")
async def test_session_that_cannot_be_interrupted_is_replaced_and_says_so(box: Sandbox) -> None:
    session = await box.session("loop")
    result = await session.run("x=1; while :; do :; done", timeout=1)
    assert result.ending == Ending.TIMEOUT and result.session_lost
    assert (await session.run("echo [$x]")).stdout == b"[]\n"


async def test_c07_pid_1_reaps(box: Sandbox) -> None:
    await box.run_shell("for i in $(seq 200); do sh -c 'sleep 0.1 &'; done", timeout=60)
    await asyncio.sleep(2)
    zombies = await box.run_shell("ps -e -o state= | grep -c '^Z'")
    assert zombies.stdout.strip() == b"0"
    assert (await box.usage()).pids <= 3


async def test_user_forms(box: Sandbox) -> None:
    assert (await box.exec(["id", "-u"], user="1234")).stdout == b"1234\n"
    assert (await box.run_shell("id -u; id -g", user="1234:4321")).stdout == b"1234\n4321\n"
    assert (await box.exec(["id", "-un"], user="nobody")).stdout == b"nobody\n"
