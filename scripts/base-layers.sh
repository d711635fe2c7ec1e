#!/bin/sh
# The layers that demo and tests start from; a layer that is there is not built again.
set -eu
have() { dsec layer ls --json | grep -q "\"name\": *\"$1\""; }

if ! have bookworm; then
  dsec layer build bookworm --debian bookworm --include python3,git,procps,ca-certificates
fi
if ! have busybox; then
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' EXIT
  chmod 755 "$tree"
  mkdir -p "$tree/bin" "$tree/etc" "$tree/root" "$tree/tmp" "$tree/proc" "$tree/dev" "$tree/sys" "$tree/var/tmp"
  chmod 1777 "$tree/tmp" "$tree/var/tmp"
  cp "$(command -v busybox)" "$tree/bin/busybox"
  for applet in $("$tree/bin/busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"; done
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$tree/etc/passwd"
  printf 'root:x:0:\nnogroup:x:65534:\n' >"$tree/etc/group"
  dsec layer build busybox --from-dir "$tree"
fi
