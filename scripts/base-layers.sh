#!/bin/sh
# The layers that demo and tests start from; a layer that is there is not built again.
set -eu
have() { dsec layer ls --json | grep -q "\"name\": *\"$1\""; }

if ! have bookworm; then
  dsec layer build bookworm --debian bookworm --include python3,git,procps,ca-certificates
fi
if ! have busybox; then
  archive=$(mktemp)
  trap 'rm -f "$archive"' EXIT
  python -m dsec.images.bases >"$archive"
  dsec layer build busybox --from-tar "$archive"
fi
