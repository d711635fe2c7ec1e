#!/bin/sh
# Install the Debian packages listed in a file, and only those that are missing: apt-install.sh FILE
set -eu
list=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$1")
missing=
for package in $list; do
  case "$(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null)" in
    ii*|hi*) ;;
    *) missing="$missing $package" ;;
  esac
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
  echo "setup: this is not Debian: install the equivalents of:$missing" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "setup: packages are missing; as root: apt-get install$missing" >&2
  exit 1
fi
echo "setup: apt-get install$missing"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get -qq -y -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 --no-install-recommends install $missing; }
# The package lists are fetched only where there are none or where they are too old to install from.
if ! ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then apt-get -qq update; fi
install >/dev/null || { echo "setup: fetching package lists"; apt-get -qq update; install >/dev/null; }
