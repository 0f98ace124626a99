#!/bin/sh
# Makes .venv with halfmoon and all it needs, the embedded engine and servers included. Called by make; quick when done.
#   scripts/setup.sh [EXTRAS]     e.g. torch,embedded,dev
#   scripts/setup.sh --python     only sees to a Python that can make virtual environments
set -eu
cd "$(dirname "$0")/.."
extras=${1:-torch,embedded}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "no $python here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or newer is needed, $python is $("$python" -c 'import platform; print(platform.python_version())'); name a newer one: make PYTHON=python3.12"

# Debian and Ubuntu ship Python without what makes virtual environments.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing $package"
    apt-get update -q && apt-get install -y -q --no-install-recommends "$package"
  else
    fail "this Python can't make virtual environments; run: sudo apt-get install $package"
  fi
fi

[ "$extras" != --python ] || exit 0

[ -x .venv/bin/python ] || { echo "setup: making .venv"; "$python" -m venv .venv; }

stamp=.venv/.halfmoon-installed
wanted="$extras $torch $(cksum <pyproject.toml)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  # torch first and by exact version: a range may choose a build with several GB of CUDA.
  case ",$extras," in *,torch,*) echo "setup: installing $torch"; .venv/bin/pip install --progress-bar on -q "$torch" ;; esac
  echo "setup: installing halfmoon[$extras]"
  .venv/bin/pip install --progress-bar on -q -e ".[$extras]"
  printf '%s\n' "$wanted" >"$stamp"
fi
