#!/bin/sh
# The Python tests: test.sh [PYTEST-ARGUMENTS]
#
# Without arguments all of them, in two lanes at once, for much of a test's time is waiting: unit, conformance and fault tests beside the system
# tests. Each lane has its own nodes, its own directory and its own leak check. With arguments one pytest, with these.
set -eu
cd "$(dirname "$0")/.."
pytest="${PYTHON:-.venv/bin/python} -m pytest"

[ $# -eq 0 ] || exec $pytest "$@"

beside=build/test-beside.log
mkdir -p build
$pytest tests/unit tests/conformance tests/faults >"$beside" 2>&1 &
lane=$!
trap 'kill "$lane" 2>/dev/null || true; wait "$lane" 2>/dev/null || true; exit 130' INT TERM HUP
status=0
$pytest tests/system || status=$?
wait "$lane" || status=$?
echo
echo "== beside it: unit, conformance and fault tests ($beside)"
cat "$beside"
exit $status
