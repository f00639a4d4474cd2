#!/usr/bin/env bash
# What needs no torch, under every Python from 3.10 on that is found: all files compile, and the commands that import no torch run.
# Where torch has a build for it, GitHub's workflow runs the tests themselves.
#   release/interpreters.sh [PYTHON ...]
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -eq 0 ]; then set -- python3.10 python3.11 python3.12 python3.13 python3.14; fi
for python in "$@"; do
  if ! "$python" --version >/dev/null 2>&1; then
    echo "$python: not found"
    continue
  fi
  "$python" -m venv "$work/$python"
  "$work/$python/bin/pip" install -qq --disable-pip-version-check -c constraints.txt numpy safetensors tokenizers typer rich jaxtyping gguf jinja2 tomli
  "$work/$python/bin/pip" install -qq --disable-pip-version-check --no-deps .
  "$work/$python/bin/python" -W error -m compileall -q clearhead tests release benchmarks
  (cd "$work" && "$work/$python/bin/clearhead" --help >/dev/null)
  sizes=$(cd "$work" && "$work/$python/bin/clearhead" presets --json | grep -c '"name"')
  (cd "$work" && "$work/$python/bin/clearhead" cost gpt2 --json >/dev/null)
  echo "$("$python" --version): every file compiles; --help, presets ($sizes sizes), cost run"
done
