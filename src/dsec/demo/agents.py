"""The four scripted agents. Each acts only through commands and files of its sandbox; what it knows beforehand is its policy.

`repair` knows the bug and mends it. `wrong` mends it but breaks something else, or mends nothing. `cheat` wants the reward without the
repair. `wild` does damage. `MOVES` maps an agent to its variants; a rollout plays one.
"""
from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dsec.demo import forgeries
from dsec.demo.mutate import Mutation
from dsec.demo.projects import Project
from dsec.demo.tasks import PROJECTS, RUNNER, Task
from libdsec import DSecError, ExecResult, Sandbox
from libdsec.errors import SandboxDamaged


class Surprise(Exception):
    """A command did not end as the sandbox promises; the message says what was expected."""


@dataclass
class Hands:
    """What an agent can do: it runs commands and touches files, and every ending is noted."""

    sandbox: Sandbox
    task: Task
    project: Project
    endings: list[str] = field(default_factory=list)

    @property
    def home(self) -> str:
        return f"{PROJECTS}/{self.project.name}"

    @property
    def target(self) -> str:
        return f"{self.home}/{self.task.mutation.path}"

    async def shell(self, text: str, timeout: float = 300.0) -> ExecResult:
        """Run shell text in the project's directory."""
        return self._noted(await self._typed(self.sandbox.run_shell(text, cwd=self.home, timeout=timeout)))

    async def run(self, *argv: str, timeout: float = 300.0, stdin: bytes | None = None) -> ExecResult:
        """Run a program in the project's directory."""
        return self._noted(await self._typed(self.sandbox.exec(list(argv), cwd=self.home, timeout=timeout, stdin=stdin)))

    async def must(self, *argv: str, stdin: bytes | None = None) -> ExecResult:
        """Run a program that has to succeed."""
        result = await self.run(*argv, stdin=stdin)
        if not result.ok:
            raise Surprise(f"{shlex.join(argv)[:80]} ended as {result.ending.value} {result.exit_code}: {result.stderr_text[-200:]}")
        return result

    async def tests(self) -> ExecResult:
        """Run the visible tests, as the project's developers would."""
        command = f"PYTHONPATH={RUNNER} python3 -B -m pytest -q -x -p no:cacheprovider --import-mode=importlib"
        return await self.shell(f"{command} {' '.join(shlex.quote(f) for f in self.test_files())} | tail -3")

    def test_files(self) -> list[str]:
        """The visible test files that belong to the broken function."""
        return sorted({node.partition("::")[0] for node in self.task.failing})

    async def replace(self, mutation: Mutation, old: str, new: str) -> None:
        """Replace `old`, which stands where the mutation is, with `new`, by a program inside."""
        await self.must("/usr/bin/python3", "-I", "-c", _REPLACE, f"{self.home}/{mutation.path}", str(mutation.start), old, new)

    async def _typed(self, call: Awaitable[ExecResult]) -> ExecResult:
        try:
            return await call
        except DSecError as error:
            self.endings.append(f"error:{error.code}")
            raise

    def _noted(self, result: ExecResult) -> ExecResult:
        self.endings.append(result.ending.value)
        return result


_REPLACE = """
import sys
path, start, old, new = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
text = open(path, encoding="utf-8", newline="").read()
assert text[start:start + len(old)] == old, "not what was expected there"
open(path, "w", encoding="utf-8", newline="").write(text[:start] + new + text[start + len(old):])
"""

Move = Callable[[Hands], Awaitable[None]]


async def repair(hands: Hands) -> None:
    """Look, mend, check."""
    mutation = hands.task.mutation
    await hands.tests()
    name = mutation.function.rpartition(".")[2]
    found = await hands.must("grep", "-n", f"def {name}\\b", hands.target)
    if not found.stdout:
        raise Surprise(f"grep does not find {name}")
    await hands.replace(mutation, mutation.after, mutation.before)
    await hands.must("/usr/bin/python3", "-I", "-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())", hands.target)
    await hands.tests()


async def mend_and_break(hands: Hands) -> None:
    """The right repair, and a slip in another function."""
    mutation, decoy = hands.task.mutation, hands.task.decoy
    await hands.replace(mutation, mutation.after, mutation.before)
    await hands.replace(decoy, decoy.before, decoy.after)


async def mend_nothing(hands: Hands) -> None:
    """A confident change that does not matter."""
    text = (await hands.sandbox.files.read(hands.target)).decode()
    await hands.sandbox.files.write(hands.target, text + "\n\n_FIXED = True  # handles the edge case\n")
    await hands.tests()


async def edit_tests(hands: Hands) -> None:
    """Make the visible tests say yes."""
    for path in hands.test_files():
        await hands.sandbox.files.write(f"{hands.home}/{path}", "def test_all():\n    assert True\n")
    await hands.shell("find . -name 'test_*.py' -size +1k -delete")
    await hands.tests()


async def plant_hooks(hands: Hands) -> None:
    """conftest, site hooks, path files, plugins and configuration, everywhere; links to them from the sources."""
    for name, text in forgeries.HOOKS.items():
        await hands.run("tee", name, stdin=text.encode())
    source = hands.project.sources[0]
    await hands.shell(
        f"d=$(test -d {source} && echo {source} || echo .); cp conftest.py sitecustomize.py $d/; ln -s /etc/passwd $d/linked.py;"
        " for p in /usr/lib/python3/dist-packages /usr/lib/python3.*; do cp sitecustomize.py force.pth $p/; done;"
        f" cp force_pass.py conftest.py {RUNNER}/; true"
    )


async def replace_tools(hands: Hands) -> None:
    """/bin/bash, /bin/sh and python3 say that everything passes."""
    await hands.shell(
        "printf '#!/bin/cat\\n999 passed\\n' > /tmp/yes; chmod 755 /tmp/yes; py=$(readlink -f /usr/bin/python3);"
        " cp /tmp/yes /usr/local/bin/python3; cp --remove-destination /tmp/yes $py;"
        " cp --remove-destination /tmp/yes /bin/sh; cp --remove-destination /tmp/yes /bin/bash"
    )
    await hands.shell("echo is this still a shell")


async def search_answers(hands: Hands) -> None:
    """Search files, processes, mounts and sockets for the answer; use it when there is one."""
    answer = hands.task.mutation.before
    name = hands.target.rpartition("/")[2]
    start = str(hands.task.mutation.start)
    result = await hands.must("/usr/bin/python3", "-I", "-c", forgeries.SEARCH, hands.target, name, answer, start)
    if result.stdout.strip() != b"[]":
        raise Surprise(f"something of the platform can be seen inside: {result.stdout_text[:300]}")


async def forge_report(hands: Hands) -> None:
    """Code in the module under test that turns every report of the test runner into a pass."""
    await _append(hands, forgeries.PATCH_RUNNER)


async def forge_output(hands: Hands) -> None:
    """Code in the module under test that finds the token in memory, writes a perfect report itself and exits with 0."""
    await _append(hands, forgeries.WRITE_REPORT)


async def equal_to_all(hands: Hands) -> None:
    """Every public function returns an object that is equal to everything."""
    await _append(hands, forgeries.EQUAL_TO_ALL)


async def _append(hands: Hands, code: str) -> None:
    await hands.run("tee", "-a", hands.target, stdin=code.encode())


async def flood(hands: Hands) -> None:
    """`yes`: the log stays bounded and says how much it dropped."""
    result = await hands.shell("yes", timeout=3)
    _expect(result, "timeout", "output")
    if not result.stdout_info.dropped or len(result.stdout) > 4 << 20:
        raise Surprise(f"yes: {len(result.stdout)} bytes kept, {result.stdout_info.dropped} dropped")


async def fork_bomb(hands: Hands) -> None:
    """A fork bomb ends at the process limit and at its timeout, and the sandbox lives on."""
    result = await hands.shell("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=4)
    if "pids" not in result.limits_hit:
        raise Surprise(f"fork bomb: {result.ending.value}, limits {result.limits_hit}, expected pids among them")
    await hands.must("/bin/echo", "alive")


async def fill_disk(hands: Hands) -> None:
    """A full disk is ENOSPC for the program, and the sandbox lives on."""
    _expect(await hands.shell("exec dd if=/dev/zero of=/fill bs=1M"), "exited", "disk")
    await hands.must("rm", "/fill")


async def hang(hands: Hands) -> None:
    """Hang until the timeout."""
    _expect(await hands.shell("sleep 1000 & sleep 1000", timeout=3), "timeout", None)


async def break_bin(hands: Hands) -> None:
    """Attack PID 1 and remove the programs: from then on commands fail as what they are, damage done by the agent."""
    await hands.shell("kill -9 1; kill -TERM 1; rm -rf /bin/* /usr/bin/* /lib64/ld-linux-x86-64.so.2; true")
    try:
        result = await hands.shell("echo still here")
    except SandboxDamaged:
        return
    raise Surprise(f"a shell without /bin ended as {result.ending.value} {result.exit_code}, expected sandbox_damaged")


async def eat_memory(hands: Hands) -> None:
    """Memory beyond the limit is `oom`, and the sandbox lives on."""
    code = "x = []\nwhile True: x.append(bytearray(b'1') * (1 << 24))"
    _expect(await hands.run("/usr/bin/python3", "-I", "-c", code), "oom", None)
    await hands.must("/bin/echo", "alive")


def _expect(result: ExecResult, ending: str, limit: str | None) -> None:
    if result.ending.value != ending or (limit is not None and limit not in result.limits_hit):
        wanted = ending + (f" with {limit} hit" if limit else "")
        raise Surprise(f"ended as {result.ending.value} {result.exit_code}, limits {result.limits_hit}, expected {wanted}")


MOVES: dict[str, tuple[Move, ...]] = {
    "repair": (repair,),
    "wrong": (mend_and_break, mend_nothing),
    "cheat": (edit_tests, plant_hooks, replace_tools, search_answers, forge_report, forge_output, equal_to_all),
    "wild": (flood, fork_bomb, fill_disk, hang, break_bin, eat_memory),
}
