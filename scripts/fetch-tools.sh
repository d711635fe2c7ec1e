#!/bin/sh
# Fetch host tools newer than this Debian release's into .tools/ (mkfs.erofs >= 1.8: tar input, reproducible images).
#
# The packages come from the archive that this machine's apt already uses, one release on, into a private apt root: nothing is installed
# and the machine's own package lists stay as they are. The programs run through the loader and libraries they came with. Running it again
# does nothing while the tools work; a failure leaves the distribution's tool in use and exits 0 with a warning (`--strict`: exits 1).
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
suite=${DSEC_TOOLS_SUITE:-trixie}
out=${DSEC_TOOLS_DIR:-$here/.tools}
strict=0; [ "${1:-}" = --strict ] && strict=1

works() { [ -x "$1" ] && "$1" --help 2>&1 | grep -q -- '--tar='; }
give_up() {
  rm -rf "$out.new"
  echo "fetch-tools: $1; layers will be built with the distribution's mkfs.erofs ($(command -v mkfs.erofs || echo 'none: apt-get install erofs-utils')), slower and not reproducible" >&2
  exit $strict
}

if works "$out/bin/mkfs.erofs"; then echo "fetch-tools: $out is up to date"; exit 0; fi
own=$(command -v mkfs.erofs || true)
if [ -n "$own" ] && works "$own"; then echo "fetch-tools: the distribution's $own is new enough"; exit 0; fi
command -v apt-get >/dev/null || give_up "no apt-get on this machine"

echo "fetch-tools: erofs-utils of $suite from this machine's Debian archive"
new=$out.new; rm -rf "$new"
mkdir -p "$new/apt/lists/partial" "$new/apt/cache/archives/partial" "$new/root" "$new/bin"
python3 "$here/src/dsec/linux/apt.py" "$suite" main >"$new/apt/tools.sources" || give_up "no archive"
: >"$new/apt/status"
chmod 755 "$new" "$new/apt"
cat >"$new/apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$new/apt/tools.sources";
Dir::Etc::sourceparts "-";
Dir::State "$new/apt";
Dir::State::lists "$new/apt/lists";
Dir::State::status "$new/apt/status";
Dir::Cache "$new/apt/cache";
Dir::Cache::archives "$new/apt/cache/archives";
APT::Get::List-Cleanup "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
DPkg::Post-Invoke "";
DPkg::Post-Invoke-Success "";
APT::Update::Post-Invoke "";
APT::Update::Post-Invoke-Success "";
CONF
export APT_CONFIG="$new/apt/apt.conf"
apt-get -q update >"$new/apt/log" 2>&1 || { tail -5 "$new/apt/log" >&2; give_up "apt-get update for $suite failed"; }
apt-get -qy --download-only --no-install-recommends install erofs-utils >>"$new/apt/log" 2>&1 ||
  { tail -5 "$new/apt/log" >&2; give_up "apt-get could not download erofs-utils of $suite"; }
for deb in "$new"/apt/cache/archives/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$new/root" || give_up "$deb could not be unpacked"; done

loader=$(cd "$new/root" && find lib64 lib usr/lib64 usr/lib -name 'ld-linux-*.so.*' 2>/dev/null | head -1)
libs=$(cd "$new/root" && dirname "$(find usr/lib lib -name 'libc.so.6' 2>/dev/null | head -1)")
[ -n "$loader" ] && [ -n "$libs" ] || give_up "the downloaded libc has no loader"
for tool in mkfs.erofs fsck.erofs dump.erofs; do
  cat >"$new/bin/$tool" <<WRAP
#!/bin/sh
# $tool of Debian $suite, through its own loader and libraries.
root=\$(dirname "\$(readlink -f "\$0")")/../root
exec "\$root/$loader" --library-path "\$root/$libs" "\$root/usr/bin/$tool" "\$@"
WRAP
  chmod 755 "$new/bin/$tool"
done
works "$new/bin/mkfs.erofs" || give_up "the downloaded mkfs.erofs does not run here"
rm -rf "$new/apt" "$new/root/usr/share/doc" "$new/root/usr/share/man" "$new/root/usr/share/locale" "$out"
mv "$new" "$out"
echo "fetch-tools: $("$out/bin/mkfs.erofs" --version 2>/dev/null | head -1) in $out"
