"""Runs named tests inside a sandbox and reports each on its own line. Sent there by the harness; stands alone on the standard library.

stdin: JSON {"token", "runner", "project", "root", "tests": [ids or files]}. Ids are relative to `root`. stdout: JSON lines
{"token", "id", "outcome"}, outcome one of passed, failed, error, skipped; the last line is {"token", "done": count}.
Run as `python3 -I -S -B inside.py`: no environment, no site directory, no working directory on the path.
"""
from __future__ import annotations

import json
import os
import resource
import sys

CPU_SECONDS = 30  # a loop without end in the code under test ends here, however busy the machine is


def main() -> int:
    order = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what code under test prints goes to stderr
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    os.environ.clear()
    os.environ.update(HOME="/nonexistent", PATH="/usr/bin:/bin", LANG="C.UTF-8", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    # the runner before the project, the standard library before both: no file of the project can stand in for either
    sys.path += [order["runner"]]
    import pytest

    sys.path += [order["project"]]
    outcomes: dict[str, str] = {}

    class Recorder:
        @staticmethod
        @pytest.hookimpl(trylast=True)
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            worst = outcomes.get(report.nodeid)
            if report.when == "call":
                outcomes[report.nodeid] = report.outcome if worst is None else worst
            elif report.outcome == "skipped":
                outcomes[report.nodeid] = "skipped"
            elif report.outcome == "failed":
                outcomes[report.nodeid] = "error"

    os.chdir(order["root"])
    options = ["-q", "-c", "/dev/null", f"--rootdir={order['root']}", "--import-mode=importlib", "--noconftest", "--tb=line"]
    options += ["--assert=plain", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:doctest"]
    pytest.main([*options, *order["tests"]], plugins=[Recorder()])
    for node, outcome in outcomes.items():
        out.write(json.dumps({"token": order["token"], "id": node, "outcome": outcome}) + "\n")
    out.write(json.dumps({"token": order["token"], "done": len(outcomes)}) + "\n")
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
