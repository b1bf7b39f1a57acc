#!/usr/bin/env bash
# The Harbor suite in an environment of its own: Harbor wants Python 3.12, and no torch is needed for a trial.
#
#   tests/harbor/run.sh [arguments of pytest]
#
# PYTHON312 names the interpreter; left out, python3.12 on the path or pyenv's. HARBOR_VENV names a folder in which the
# environment is made once and kept; left out, it is made anew and removed. Ends with 3 if there is no Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/../.."

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

python=""
for candidate in "${PYTHON312:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
  if [ -n "$candidate" ] && fits "$candidate"; then
    python=$candidate
    break
  fi
  if [ -n "${PYTHON312:-}" ]; then
    echo "harbor: PYTHON312 must be a Python 3.12 or newer, got $PYTHON312"
    exit 3
  fi
done
if [ -z "$python" ]; then
  echo "harbor: no Python 3.12 here: set PYTHON312, or install python3.12"
  exit 3
fi
if ! command -v bwrap >/dev/null; then
  echo "harbor: no bubblewrap here: apt install bubblewrap"
  exit 1
fi

if [ -n "${HARBOR_VENV:-}" ]; then
  venv=$HARBOR_VENV
else
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  venv=$scratch/venv
fi
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import harbor.trial, pytest' 2>/dev/null; then
  echo "harbor: an environment of $("$python" --version) in $venv"
  "$python" -m venv "$venv"
  # What a trial imports, by the ranges of setup.cfg; what only training and figures need stays out.
  "$python" - >"$venv/requirements.txt" <<'END'
import configparser, re
settings = configparser.ConfigParser()
settings.read("setup.cfg")
extras = settings["options.extras_require"]
lines = [*settings["options"]["install_requires"].split("\n"), *extras["harbor"].split("\n")]
lines += [line for line in extras["test"].split("\n") if line.startswith("pytest")]
left_out = {"torch", "einops", "safetensors", "tyro", "matplotlib"}
print("\n".join(line for line in lines if line and re.split(r"[<>=; ]", line)[0] not in left_out))
END
  "$venv/bin/pip" install -q --no-compile -r "$venv/requirements.txt"
fi

echo "harbor: $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("harbor"))') of Harbor"
export LITELLM_LOCAL_MODEL_COST_MAP=True OMP_NUM_THREADS=1
if command -v pyright >/dev/null; then
  pyright --project tests/harbor/pyrightconfig.json --pythonpath "$venv/bin/python"
else
  echo "harbor: no pyright on the path, types are not checked"
fi
# Not the suite's conftest, which wants what only the laws of core need; Harbor's own warnings are not ours.
"$venv/bin/python" -m pytest tests/harbor --confcutdir=tests/harbor -o filterwarnings=default -q "$@"
