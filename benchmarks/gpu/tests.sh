#!/usr/bin/env bash
# All tests that need a CUDA GPU: `make test-gpu`. Each file runs in a process of its own, side by side; then a table. The exit code
# is 0 only if every file passed; without a GPU it says so and ends with 0.
#   PYTHON=python3  the python that has torch     LIMIT=500  seconds for each file     SHOW=8  lines of each failure
#   benchmarks/gpu/tests.sh FILES...              only these
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CLEARHEAD_SHAPES=unchecked OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
found=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")' 2>&1) || {
  echo "error: $python can not import torch: ${found##*$'\n'}; name another: make test-gpu GPU_PYTHON=..." >&2; exit 1; }
if [ "$found" = none ]; then
  echo "SKIPPED: all GPU tests. $python's torch sees no CUDA GPU here, so nothing was tested." >&2
  exit 0
fi
files=${*:-tests/kernels/test_gpu.py tests/kernels/test_gpu_cross_entropy.py tests/quantization/test_float8.py tests/engine/test_on_cuda.py tests/engine/test_fast_paths.py tests/costs/test_activations.py tests/training/test_fp8.py tests/training/test_on_cuda.py}
logs=$(mktemp -d)
declare -A pids
for file in $files; do
  timeout "${LIMIT:-500}" "$python" -m pytest "$file" -q -p no:cacheprovider --maxfail=5 >"$logs/${file//\//-}" 2>&1 &
  pids[$file]=$!
done
failed=0
printf '\n%-45s %-7s %s\n' "GPU tests on one $found" "exit" "pytest's last line"
for file in $files; do
  wait "${pids[$file]}"; code=$?
  log="$logs/${file//\//-}"
  [ $code = 0 ] || failed=$((failed + 1))
  case $code in 0) word=ok;; 124) word=time;; *) word=$code;; esac
  printf '%-45s %-7s %s\n' "$file" "$word" "$(tail -n 1 "$log")"
  [ $code = 0 ] || grep -E '^(FAILED|ERROR|E  )' "$log" | head -"${SHOW:-8}"
done
[ -z "${OUT:-}" ] || cp -r "$logs" "$OUT/gpu-tests"
[ $failed = 0 ] && echo "all passed; logs: $logs" || echo "$failed of the files above failed; logs: $logs" >&2
exit $((failed > 0))
