#!/usr/bin/env bash
# All tests that need a GPU, each file in a process of its own, side by side; a table of results at the end.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH=. CLEARHEAD_SHAPES=unchecked
files=${*:-tests/kernels/test_gpu.py tests/kernels/test_gpu_cross_entropy.py tests/quantization/test_float8.py tests/engine/test_on_cuda.py tests/engine/test_fast_paths.py tests/training/test_on_cuda.py}
logs=$(mktemp -d)
pids=()
for file in $files; do
  timeout "${LIMIT:-500}" python3 -m pytest "$file" -q -p no:cacheprovider --maxfail=5 >"$logs/${file//\//-}" 2>&1 &
  pids+=($!)
done
wait "${pids[@]}"
for file in $files; do
  log="$logs/${file//\//-}"
  printf '%-45s %s\n' "$file" "$(tail -n 1 "$log")"
  grep -E '^(FAILED|ERROR|E  )' "$log" | head -"${SHOW:-8}"
done
cp -r "$logs" "${OUT:-/tmp}/gpu-tests" 2>/dev/null
