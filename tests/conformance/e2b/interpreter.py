"""As features.py, for `e2b_code_interpreter`: runs inside the venv of one version, with nothing of ours."""
from __future__ import annotations

import asyncio
import sys
import threading
import time

from e2b_code_interpreter import AsyncSandbox, Sandbox
from probing import feature, main


@feature("run_code: state, streams, the last expression")
def run_code(s: Sandbox) -> None:
    out: list[str] = []
    ran = s.run_code("import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1", on_stdout=lambda line: out.append(line.line))
    assert ran.text == "42" and not ran.error and "".join(ran.logs.stdout) == "out\n" and "".join(ran.logs.stderr) == "err\n" and "".join(out) == "out\n"
    again = s.run_code("x += 1; x")
    assert again.text == "42" and again.execution_count == ran.execution_count + 1
    assert s.run_code("x = 1;").text is None and s.run_code("import subprocess; subprocess.run(['echo', 'of a child'])").logs.stdout == ["of a child\n"]
    assert "".join(s.run_code("for i in range(100_000): print(i)").logs.stdout) == "".join(f"{i}\n" for i in range(100_000))
    assert s.run_code("import asyncio\nawait asyncio.sleep(0)\n'é' * 3").text == "'ééé'"


@feature("results: text, html, png, json, several")
def results(s: Sandbox) -> None:
    made = s.run_code(
        "import base64\nclass Rich:\n    def _repr_html_(self): return '<b>bold</b>'\n    def _repr_png_(self): return base64.b64decode('iVBORw0KGgo=')\n"
        "    def _repr_json_(self): return {'a': [1, None]}\n    def _repr_markdown_(self): return '**x**'\n    def __repr__(self): return 'rich'\n"
        "print('before')\ndisplay('one')\nprint('between')\nRich()"
    )
    first, last = made.results
    assert first.text == "'one'" and not first.is_main_result and last.is_main_result
    assert (last.text, last.html, last.png, last.json, last.markdown) == ("rich", "<b>bold</b>", "iVBORw0KGgo=", {"a": [1, None]}, "**x**")
    assert "".join(made.logs.stdout) == "before\nbetween\n" and set(last.formats()) >= {"html", "png", "json", "markdown"}


@feature("errors")
def errors(s: Sandbox) -> None:
    failed = s.run_code("def f():\n    return 1 / 0\nf()")
    assert failed.error is not None and (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
    assert "line 2, in f" in failed.error.traceback and "return 1 / 0" in failed.error.traceback and "kernel" not in failed.error.traceback, failed.error.traceback
    assert s.run_code("if").error.name == "SyntaxError" and s.run_code("raise SystemExit(3)").error.name == "SystemExit"
    assert s.run_code("'still here'").text == "'still here'"


@feature("contexts")
def contexts(s: Sandbox) -> None:
    one, two = s.create_code_context(cwd="/tmp"), s.create_code_context()
    assert one.cwd == "/tmp" and one.language == "python" and one.id != two.id
    s.run_code("y = 'of one'", context=one)
    assert s.run_code("import os; y + os.getcwd()", context=one).text == "'of one/tmp'"
    assert s.run_code("y", context=two).error.name == "NameError" and s.run_code("y").error.name == "NameError"
    if hasattr(s, "list_code_contexts"):
        assert {one.id, two.id} <= {context.id for context in s.list_code_contexts()}
        s.restart_code_context(one)
        assert s.run_code("y", context=one).error.name == "NameError"
        s.remove_code_context(one)
        assert one.id not in {context.id for context in s.list_code_contexts()}
        try:
            s.run_code("1", context=one)
        except Exception:
            return
        raise AssertionError("a context that was removed runs code")


@feature("bash")
def bash(s: Sandbox) -> None:
    s.run_code("cd /usr; z=kept", language="bash")
    ran = s.run_code("pwd; echo $z; echo bad >&2", language="bash")
    assert "".join(ran.logs.stdout) == "/usr\nkept\n" and "".join(ran.logs.stderr) == "bad\n" and not ran.error
    assert s.run_code("(exit 3)", language="bash").error.value == "3"


@feature("environment of a cell")
def environment(s: Sandbox) -> None:
    assert s.run_code("import os; os.environ['K']", envs={"K": "v"}).text == "'v'"
    assert s.run_code("os.environ.get('K', 'gone')").text == "'gone'"


@feature("magics")
def magics(s: Sandbox) -> None:
    assert s.run_code("!echo from the shell").logs.stdout == ["from the shell\n"]
    assert s.run_code("%cd /var\nimport os\nos.getcwd()").text == "'/var'"
    assert "".join(s.run_code("%%bash\nfor i in 1 2; do echo $i; done").logs.stdout) == "1\n2\n"
    assert "no_such" in s.run_code("%no_such").error.value


@feature("a cell whose client is gone ends")
def abandoned(s: Sandbox) -> None:
    s.run_code("kept = 'state'")
    started = threading.Event()
    try:
        s.run_code("import time\nprint('on', flush=True)\ntime.sleep(100)", on_stdout=lambda line: started.set(), timeout=1)
    except Exception:
        pass
    assert started.is_set()
    began = time.monotonic()
    assert s.run_code("kept").text == "'state'" and time.monotonic() - began < 20


@feature("a context that dies, and one that lies")
def hostile(s: Sandbox) -> None:
    context = s.create_code_context()
    died = s.run_code("import os\nprint('last words', flush=True)\nos._exit(7)", context=context)
    assert died.error is not None and died.error.name == "ContextLost"
    lies = (
        "import contextlib, os\nfor line in [b'not json\\n', b'[1]\\n', b'{\"type\": \"result\", \"text\": 5, \"png\": [1], \"is_main_result\": 1}\\n', b'{\"type\": \"error\"}\\n', "
        "b'{\"type\": \"number_of_executions\", \"execution_count\": \"x\"}\\n', b'{\"type\": \"nothing\"}\\n', b'{' * 5000 + b'\\n']:\n    for fd in range(60, 80):\n        with contextlib.suppress(OSError):\n            os.write(fd, line)\n'done'"
    )
    lied = s.run_code(lies)
    assert lied.text == "'done'", (lied, lied.error)
    assert s.run_code("1 + 1").text == "2"


@feature("async")
def asynchronous(s: Sandbox) -> None:
    async def work() -> None:
        box = await AsyncSandbox.connect(s.sandbox_id)
        made = [await box.create_code_context() for _ in range(3)]
        ran = await asyncio.gather(*(box.run_code(f"import time; time.sleep(0.5); {n}", context=context) for n, context in enumerate(made)))
        assert [one.text for one in ran] == ["0", "1", "2"]

    asyncio.run(work())


if __name__ == "__main__":
    sys.exit(main(lambda: Sandbox.create(timeout=120)))
