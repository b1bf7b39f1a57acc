#!/usr/bin/env bash
# The Megatron trainer against the torch trainer, on the CPU: megatron-core in an environment of its own on top of the
# one that `python` is of (which has the project with its test extra). On two quiet cores about three minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
own=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/base.pth"
# The wheel says Python 3.12, but is one of 3.11 too; what it needs beside torch is in the test extra.
"$scratch/venv/bin/python" -m pip install -q --no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'

cd "$root"
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
if command -v pyright >/dev/null; then
  pyright -p tests/megatron --pythonpath "$scratch/venv/bin/python"
fi
exec "$scratch/venv/bin/python" -m pytest -q -p no:cacheprovider tests/megatron "$@"
