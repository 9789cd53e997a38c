#!/usr/bin/env bash
# Builds the wheel and tries it without extras on every Python that can be had: it installs, all of it compiles, and where
# there is a torch it is imported and trains ten steps.
#
#   TORCH=torch==2.13.0 tools/matrix.sh     installs this torch on each Python, from the package index
#   tools/matrix.sh                         uses the torch of $WITH_TORCH (default .venv/bin/python), on its version of Python
set -euo pipefail
cd "$(dirname "$0")/.."
WITH_TORCH=${WITH_TORCH:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# python3.12 may be a shim that starts nothing; pyenv keeps those it has in a folder.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if [ "$(version "$candidate")" = "$1" ]; then echo "$candidate"; return; fi
  done
}

cat > "$work/ten_steps.py" <<'PYTHON'
import hdet, torch

assert "matrix-of-wheels" in hdet.__file__, hdet.__file__
weights = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weights], lr=0.1)
scheduler = hdet.AutoLR(optimizer, total_steps=10)
for _ in range(10):
    optimizer.zero_grad()
    loss = (weights**2).sum()
    loss.backward()
    optimizer.step()
    scheduler.step(loss)
assert scheduler.finished and loss < 3, (scheduler, loss)
PYTHON

cp -r pyproject.toml README.md LICENSE src "$work/"  # a build leaves files beside the sources
"$WITH_TORCH" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work"
wheel=$(ls "$work"/dist/*.whl)
num_trained=0
for minor in 10 11 12 13 14; do
  python=$(find_python "3.$minor")
  if [ -z "$python" ]; then echo "3.$minor: not on this machine"; continue; fi
  env="$work/matrix-of-wheels-3.$minor"
  "$python" -m venv "$env"
  own() { "$env/bin/python" -I "$@"; }
  if [ -n "${TORCH:-}" ]; then
    own -m pip install --quiet --disable-pip-version-check "$TORCH" "$wheel"
  else
    own -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
    if [ "$(version "$WITH_TORCH")" = "3.$minor" ]; then
      # After its own packages in the path, so that the wheel comes first.
      "$WITH_TORCH" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
        > "$(own -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch.pth"
    fi
  fi
  own -W error -m compileall -q "$(own -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hdet"
  if own -c 'import torch' 2>/dev/null; then
    (cd "$work" && own ten_steps.py)
    num_trained=$((num_trained + 1))
    echo "3.$minor: installed, compiled, imported and trained with torch $(own -c 'import torch; print(torch.__version__)')"
  else
    echo "3.$minor: installed and compiled; no torch to train with (TORCH=torch==... installs one)"
  fi
done
[ "$num_trained" -gt 0 ] || { echo "no Python with a torch: set TORCH or WITH_TORCH" >&2; exit 1; }
