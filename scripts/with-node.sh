#!/bin/sh
# Run a command beside a node of its own, then end the node: with-node.sh COMMAND...
#
# The node's layers stay in build/state, so that they are built once; its sandboxes, writable layers, sockets and logs do not outlive the
# command. DSEC_URL and DSEC_STATE tell the command (the CLI, the SDK) where the node is.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
export PATH="$root/.venv/bin:$PATH"
export DSEC_STATE="$root/build/state"
run=$(mktemp -d /tmp/dsec.XXXXXX)
export DSEC_RUN="$run/run" DSEC_LISTEN=127.0.0.1:0 DSEC_URL="unix://$run/run/node.sock"
unset DSEC_API_KEY DSEC_CONFIG
mkdir -p "$DSEC_STATE"

finish() {
  status=$?
  trap - EXIT INT TERM HUP
  dsec down --quiet || status=1
  rm -rf "$run" "$DSEC_STATE/medium.btrfs" "$DSEC_STATE/sandboxes" "$DSEC_STATE/journal.jsonl"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM HUP
dsec up --detach --quiet
"$@"
