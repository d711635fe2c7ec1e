#!/bin/sh
# Fetch host tools newer than this Debian release's into .tools/: mkfs.erofs >= 1.8 (tar input, reproducible images), criu >= 4.1 (forks with
# memory; older ones do not know the kernels that dsec runs on), and a kernel for the guests of microVMs with the modules that they load.
#
# The packages come from the archive that this machine's apt already uses, one release on, into a private apt root: nothing is installed
# and the machine's own package lists stay as they are. The programs run through the loader and libraries they came with. Running it again
# does nothing while the tools work; a failure leaves the distribution's tool in use, or no criu, and exits 0 with a warning (`--strict`: exits 1).
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
suite=${DSEC_TOOLS_SUITE:-trixie}
out=${DSEC_TOOLS_DIR:-$here/.tools}
strict=0; [ "${1:-}" = --strict ] && strict=1

packs() { [ -x "$1" ] && "$1" --help 2>&1 | grep -q -- '--tar='; }
freezes() { [ -x "$1/criu" ] && [ -d "$1/plugins" ] && "$1/ld.so" --library-path "$1/lib" "$1/criu" --version 2>/dev/null | grep -q 'Version: \(4\.[1-9]\|[5-9]\)'; }
boots() { [ -s "$1/vmlinuz" ] && [ -n "$(find "$1/modules" -name 'virtio_pmem.ko*' 2>/dev/null)" ]; }
give_up() {
  rm -rf "$out.new"
  echo "fetch-tools: $1; layers are built with $(command -v mkfs.erofs || echo 'no mkfs.erofs: apt-get install erofs-utils'), slower and not reproducible where that is old; forks have no memory without $out/criu" >&2
  exit $strict
}

want=
own=$(command -v mkfs.erofs || true)
if packs "$out/bin/mkfs.erofs"; then echo "fetch-tools: $out/bin/mkfs.erofs is up to date"
elif [ -n "$own" ] && packs "$own"; then echo "fetch-tools: the distribution's $own is new enough"
else want=erofs-utils; fi
if freezes "$out/criu"; then echo "fetch-tools: $out/criu is up to date"; else want="$want criu"; fi
if [ "$(uname -m)" = x86_64 ]; then
  if boots "$out/guest"; then echo "fetch-tools: the guest kernel in $out/guest is up to date"; else want="$want guest"; fi
fi
[ -n "$want" ] || exit 0
command -v apt-get >/dev/null || give_up "no apt-get on this machine"

echo "fetch-tools: $want of $suite from this machine's Debian archive"
new=$out.new; rm -rf "$new"
mkdir -p "$new/apt/lists/partial" "$new/bin"
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

# A package and all that it needs, into $new/$1.root; sets $loader and $libs, relative to that.
unpack() {
  root=$new/$1.root
  mkdir -p "$root" "$new/apt/$1/partial"
  apt-get -qy -o Dir::Cache::archives="$new/apt/$1" --download-only --no-install-recommends install "$1" >>"$new/apt/log" 2>&1 ||
    { tail -5 "$new/apt/log" >&2; give_up "apt-get could not download $1 of $suite"; }
  for deb in "$new/apt/$1"/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" || give_up "$deb could not be unpacked"; done
  loader=$(cd "$root" && find lib64 lib usr/lib64 usr/lib -name 'ld-linux-*.so.*' 2>/dev/null | head -1)
  libs=$(cd "$root" && dirname "$(find usr/lib lib -name 'libc.so.6' 2>/dev/null | head -1)")
  [ -n "$loader" ] && [ -n "$libs" ] || give_up "the downloaded libc of $1 has no loader"
}

erofs() {
  unpack erofs-utils
  for tool in mkfs.erofs fsck.erofs dump.erofs; do
    cat >"$new/bin/$tool" <<WRAP
#!/bin/sh
# $tool of Debian $suite, through its own loader and libraries.
root=\$(dirname "\$(readlink -f "\$0")")/../root
exec "\$root/$loader" --library-path "\$root/$libs" "\$root/usr/bin/$tool" "\$@"
WRAP
    chmod 755 "$new/bin/$tool"
  done
  mv "$root" "$new/root"
  packs "$new/bin/mkfs.erofs" || give_up "the downloaded mkfs.erofs does not run here"
  rm -rf "$new/root/usr/share/doc" "$new/root/usr/share/man" "$new/root/usr/share/locale" "$out/root" "$out/bin"
  mkdir -p "$out"
  mv "$new/root" "$new/bin" "$out"
  echo "fetch-tools: $("$out/bin/mkfs.erofs" --version 2>/dev/null | head -1) in $out"
}

# Only the loader, the program and the libraries that it names: what is in this directory can be seen in a sandbox while criu works there.
criu() {
  unpack criu
  mkdir -p "$new/criu/lib" "$new/criu/plugins"           # of the second: nothing, instead of what a sandbox has where criu looks
  cp -L "$root/$loader" "$new/criu/ld.so"
  cp "$root/usr/sbin/criu" "$new/criu/criu"
  "$root/$loader" --library-path "$root/$libs" --list "$root/usr/sbin/criu" | sed -n 's/^[[:space:]]*\([^ ]*\) => .*/\1/p' |
    while read -r lib; do [ -e "$root/$libs/$lib" ] && cp -L "$root/$libs/$lib" "$new/criu/lib/"; done
  chmod -R u=rwX,go=rX "$new/criu"
  chmod 755 "$new/criu/ld.so" "$new/criu/criu"
  freezes "$new/criu" || give_up "the downloaded criu does not run here"
  rm -rf "$out/criu"
  mkdir -p "$out"
  mv "$new/criu" "$out"
  echo "fetch-tools: criu $("$out/criu/ld.so" --library-path "$out/criu/lib" "$out/criu/criu" --version | sed -n 's/^Version: //p') in $out/criu"
}

# The kernel that the archive's meta package names, and of its modules those that a guest may load.
guest() {
  name=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -1)
  [ -n "$name" ] || give_up "$suite has no linux-image-cloud-amd64"
  mkdir -p "$new/kernel/tree" "$new/guest/modules"
  (cd "$new/kernel" && apt-get -q download "$name" >>"$new/apt/log" 2>&1) || { tail -5 "$new/apt/log" >&2; give_up "apt-get could not download $name of $suite"; }
  dpkg-deb --fsys-tarfile "$new/kernel"/*.deb | tar -x -C "$new/kernel/tree" --wildcards './boot/vmlinuz-*' './usr/lib/modules/*/kernel/*' './lib/modules/*/kernel/*' './usr/share/doc/*/copyright' 2>/dev/null || true
  cp "$new/kernel/tree"/boot/vmlinuz-* "$new/guest/vmlinuz" 2>/dev/null || give_up "$name has no kernel"
  find "$new/kernel/tree" -path '*/modules/*' -name '*.ko*' \( -path '*/kernel/drivers/virtio/*' -o -path '*/kernel/drivers/nvdimm/*' -o -path '*/kernel/drivers/dax/*' \
    -o -path '*/kernel/drivers/block/virtio_blk*' -o -path '*/kernel/drivers/char/virtio_console*' -o -path '*/kernel/fs/erofs/*' -o -path '*/kernel/fs/overlayfs/*' -o -path '*/kernel/fs/ext4/*' \
    -o -path '*/kernel/fs/jbd2/*' -o -path '*/kernel/fs/mbcache*' -o -path '*/kernel/fs/netfs/*' -o -path '*/kernel/crypto/*' -o -path '*/kernel/lib/*' \) -exec cp {} "$new/guest/modules/" \;
  find "$new/kernel/tree" -name copyright -exec cp {} "$new/guest/copyright" \; -quit
  chmod -R u=rwX,go=rX "$new/guest"
  boots "$new/guest" || give_up "$name lacks virtio_pmem"
  rm -rf "$out/guest"
  mkdir -p "$out"
  mv "$new/guest" "$out"
  echo "fetch-tools: ${name#linux-image-} for guests in $out/guest"
}

for package in $want; do
  case $package in
    guest) guest ;;
    erofs-utils) erofs ;;
    criu) criu ;;
  esac
done
rm -rf "$new"
