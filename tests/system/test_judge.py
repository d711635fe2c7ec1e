"""The judge: every verdict, checkers, interactors, groups, and what is measured; on gcc and g++ of Debian."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests import toolchain
from tests.harness import Node

from libdsec import Case, DSecClient, FnCallArgs, FnLimits, JudgeSpec, SyncDSecClient, Tool, Verdict
from libdsec.errors import InvalidRequest, Unsupported

SUM = "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }\n"
CASES = [Case(name=f"c{n}", stdin=b"%d %d\n" % (n, n * n), answer=b"%d\n" % (n + n * n)) for n in range(20)]
BODY = "#include <cstdio>\n#include <cstdlib>\n#include <vector>\n#include <unistd.h>\n#include <csignal>\nint main() { %s }\n"
CHECKER = """
import sys
read = lambda name: open(name).read().split()
n, said, right = read(sys.argv[1]), read(sys.argv[2]), read(sys.argv[3])
print("looked at", said, file=sys.stderr)
sys.exit({"good": 0, "bad": 1, "form": 2, "broken": 3, "half": 66}.get(said[0], 9) if said else 8)
"""
INTERACTOR = """
#include <cstdio>
int main(int argc, char **argv) {
  int n, g, k = 0;
  FILE *f = fopen(argv[1], "r");
  if (fscanf(f, "%d", &n) != 1) return 3;
  while (k++ < 10 && scanf("%d", &g) == 1) {
    puts(g == n ? "=" : n < g ? "<" : ">");
    fflush(stdout);
    if (g == n) { fprintf(stderr, "in %d", k); return 0; }
  }
  fprintf(stderr, "not found");
  return 1;
}
"""
GUESS = """
#include <cstdio>
int main() { int lo = 1, hi = %d; char r[9];
  for (;;) { int m = (lo + hi) / 2; printf("%%d\\n", m); fflush(stdout);
    if (scanf("%%8s", r) != 1) return 1;
    if (*r == '=') return 0;
    if (*r == '<') hi = m - 1; else lo = m + 1; } }
"""


@pytest.fixture(scope="module")
def compilers(node: Node, python_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    with SyncDSecClient(node.url, api_key=node.key) as client:
        return toolchain.make(client, python_image, "compilers", tmp_path_factory.mktemp("toolchain"))


@pytest.fixture
def judge(client: DSecClient, compilers: str) -> Callable[..., Any]:
    async def run(code: str, language: str = "cpp", cases: Any = None, **spec: Any) -> Any:
        spec.setdefault("time_limit", 2.0)
        args = FnCallArgs(image=compilers, kind="judge", code=code, judge=JudgeSpec(language=language, cases=cases or CASES[:1], **spec))
        return await client.run_fncall(args, timeout=120)

    return run


async def test_accepted_in_three_languages(judge: Callable[..., Any]) -> None:
    c = "#include <stdio.h>\nint main(void) { long a, b; if (scanf(\"%ld %ld\", &a, &b) != 2) return 1; printf(\"%ld\\n\", a + b); }\n"
    for language, code in (("cpp", SUM), ("c", c), ("python", "a, b = map(int, input().split()); print(a + b)")):
        cases = CASES * 4 if language == "cpp" else CASES  # enough of them for a box to be made while a program is put into another
        got = await judge(code, language, cases)
        assert got.verdict is Verdict.AC and got.ok and [case.name for case in got.judge.cases] == [case.name for case in cases], got
        assert (got.judge.score, got.judge.of, got.judge.status_id, got.judge.status) == (len(cases), len(cases), 3, "Accepted")
        assert all(0 < case.usage.cpu < 2 and case.usage.memory_peak > 0 and case.usage.max_rss > 0 and case.exit_code == 0 for case in got.judge.cases)


@pytest.mark.parametrize(
    ("body", "verdict", "status"),
    [
        ('puts("1");', Verdict.WA, 4), ("for (;;) {}", Verdict.TLE, 5), ("sleep(60);", Verdict.TLE, 5),
        ("std::vector<char> v(100 << 20, 1); puts(v[5] ? \"0\" : \"1\");", Verdict.MLE, 12), ("return 3;", Verdict.RE, 11),
        ("raise(SIGSEGV);", Verdict.RE, 7), ("abort();", Verdict.RE, 10), ('for (;;) puts("xxxxxxxxxxxxxxxxxxxxxxxxx");', Verdict.OLE, 8),
        ("int x = nonsense;", Verdict.CE, 6),
    ],
)  # fmt: skip
async def test_verdicts(judge: Callable[..., Any], body: str, verdict: Verdict, status: int) -> None:
    got = await judge(BODY % body, time_limit=0.3, wall_limit=1.0 if "sleep" in body else 20.0, memory_mb=32)
    assert (got.verdict, got.judge.status_id) == (verdict, status), got
    if verdict is Verdict.CE:
        assert not got.compile.ok and "nonsense" in got.compile.output and got.judge.cases == []
    if body.startswith("for (;;) {}"):
        assert got.judge.cases[0].usage.cpu > 0.3 and got.judge.cases[0].usage.wall < 10


async def test_checkers_of_the_node(judge: Callable[..., Any]) -> None:
    body = BODY % 'puts("1.0000001  2 ");'
    for checker, answer, verdict in (("tokens", b"1.0000001 2\n", Verdict.AC), ("exact", b"1.0000001  2 \n", Verdict.AC), ("lines", b"1.0000001  2", Verdict.AC),
                                     ("exact", b"1.0000001 2\n", Verdict.PE), ("float", b"1 2", Verdict.AC), ("tokens", b"1 2", Verdict.WA)):  # fmt: skip
        got = await judge(body, cases=[Case(answer=answer)], checker=checker)
        assert got.verdict is verdict, (checker, answer, got)


async def test_a_checker_of_ones_own(judge: Callable[..., Any]) -> None:
    words = {b"good": (Verdict.AC, 1), b"bad": (Verdict.WA, 0), b"form": (Verdict.PE, 0), b"broken": (Verdict.SE, 0), b"half": (Verdict.WA, 0.5), b"": (Verdict.PE, 0)}
    cases = [Case(stdin=word, answer=b"x") for word in words]
    got = await judge("import sys; print(sys.stdin.read(), end='')", "python", cases, checker_program=Tool(language="python", code=CHECKER))
    assert [(case.verdict, case.points) for case in got.judge.cases] == list(words.values())
    assert got.judge.cases[0].message == "looked at ['good']" and got.verdict is Verdict.SE
    broken = await judge(SUM, checker_program=Tool(language="c", code="int main( {"))
    assert broken.verdict is Verdict.SE and "checker_program does not compile" in broken.stderr_text


async def test_interactive(judge: Callable[..., Any]) -> None:
    tool = Tool(language="cpp", code=INTERACTOR)
    cases = [Case(stdin=b"77"), Case(stdin=b"1000"), Case(stdin=b"1")]
    got = await judge(GUESS % 1000, cases=cases, interactor=tool)
    assert got.verdict is Verdict.AC and got.judge.cases[0].message.startswith("in "), got
    far = await judge(GUESS % 1000000, cases=cases[:1], interactor=tool)
    assert far.verdict is Verdict.WA and far.judge.cases[0].message == "not found"
    silent = await judge(BODY % "pause();", cases=cases[:1], interactor=tool, time_limit=0.3, wall_limit=1.0)
    assert silent.verdict is Verdict.TLE
    early = await judge(BODY % "return 0;", cases=cases[:1], interactor=tool)
    assert early.verdict is Verdict.WA


async def test_groups_are_all_or_nothing(judge: Callable[..., Any]) -> None:
    cases = [Case(stdin=b"1 1", answer=b"2", group="easy", score=10), Case(stdin=b"2 2", answer=b"4", group="easy", score=20),
             Case(stdin=b"3 3", answer=b"0", group="hard", score=30), Case(stdin=b"4 4", answer=b"8", group="hard", score=40)]  # fmt: skip
    got = await judge(SUM, cases=cases)
    assert [(group.name, group.score, group.of, group.passed) for group in got.judge.groups] == [("easy", 30, 30, True), ("hard", 0, 70, False)]
    assert (got.verdict, got.judge.score, got.judge.of) == (Verdict.WA, 30, 100)
    first = await judge(SUM, cases=[cases[2], *cases], stop="failure")
    assert [case.verdict for case in first.judge.cases] == [Verdict.WA] + [Verdict.SKIPPED] * 4


async def test_times_near_the_limit_are_measured_again(judge: Callable[..., Any]) -> None:
    burn = BODY % "struct timespec t; do clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); while (t.tv_sec * 1e9 + t.tv_nsec < 330e6);"
    got = await judge("#include <ctime>\n" + burn, cases=[Case()], time_limit=0.3, wall_limit=20.0)
    assert got.verdict is Verdict.TLE and got.judge.cases[0].runs == 3 and 0.33 <= got.judge.cases[0].usage.cpu < 0.6
    under = await judge("#include <ctime>\n" + burn, cases=[Case()], time_limit=2.0, wall_limit=20.0)
    assert under.verdict is Verdict.AC and under.judge.cases[0].runs == 1 and 0.33 <= under.judge.cases[0].usage.cpu < 0.6


async def test_compile_and_run(client: DSecClient, compilers: str) -> None:
    args = FnCallArgs(image=compilers, kind="compile_run", language="cpp", code='#include "h.h"\n' + SUM, stdin="2 3", files={"h.h": "#define X 1\n"})
    got = await client.run_fncall(args, timeout=60)
    assert got.ok and got.stdout == b"5\n" and got.compile and got.compile.ok and got.compile.usage and got.compile.usage.cpu > 0
    again = await client.run_fncall(args, timeout=60)
    assert again.stdout == b"5\n" and again.compile and again.compile.usage is None  # compiled once
    wrong = await client.run_fncall(FnCallArgs(image=compilers, kind="compile_run", language="c", code="int main( {"), timeout=60)
    assert wrong.exit_code is None and not wrong.ok and wrong.compile and "error" in wrong.compile.output
    bomb = "#include <vector>\ntemplate<int N> struct X { typedef typename X<N-1>::t t; static char a[N]; };\ntemplate<> struct X<0> { typedef int t; };\nX<900000>::t x; int main() {}"
    slow = await client.run_fncall(FnCallArgs(image=compilers, kind="judge", code=bomb, judge=JudgeSpec(
        language="cpp", cases=CASES[:1], compile=FnLimits(wall=2.0, memory_mb=256))), timeout=60)  # fmt: skip
    assert slow.verdict is Verdict.CE


async def test_what_cannot_be_judged_is_refused(judge: Callable[..., Any], client: DSecClient, compilers: str) -> None:
    for spec, field in (({"checker": "psychic"}, "judge.checker"), ({"time_limit": 0}, "judge.time_limit"), ({"stop": "now"}, "judge.stop"),
                        ({"language": "cobol"}, "judge.language"), ({"cases": [Case()] * 10001}, "judge.cases"),
                        ({"interactor": Tool(language="c", code=""), "checker_program": Tool(language="c", code="")}, "judge.checker_program")):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            await judge(SUM, **spec)
        assert refused.value.details["field"] == field
    with pytest.raises(Unsupported) as absent:
        await judge("fn main() {}", "rust")
    assert absent.value.details["capability"] == "language:rust"
    present = {language.name for language in await client.languages(compilers) if language.present}
    assert {"c", "cpp", "python"} <= present and "rust" not in present


