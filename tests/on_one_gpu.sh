#!/usr/bin/env bash
# Runs tests of ranks on one GPU, which the ranks share under MPS; several jobs at a time.
#
#     tests/on_one_gpu.sh LOGS [RANKS [SECONDS [FOLDER or FILE ...]]]
#
# Starts MPS and ends it. Prints a line for each job, and the failures of a job that
# failed; LOGS gets a folder for each job, with a file for each rank (rank.py). A job is
# killed after SECONDS (600). A job ends at its first failure, so it is then started
# again without that test, at most twice. The exit code is the number of jobs that failed
# or did not start, because LATEST seconds had passed.
#
# MPS=0: each rank has a GPU of its own. TOGETHER: how many jobs at a time.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1 ranks=${2:-2} seconds=${3:-600} together=${TOGETHER:-5}
shift $(($# < 3 ? $# : 3))
paths=("$@")
(($#)) || paths=(tests/ranks/*/ tests/ranks/test_*.py tests/gpu/test_*.py)
paths=("${paths[@]%/}")
# They compare the GPU's free memory, which other jobs change.
alone=(tests/ranks/communicators/test_leftovers.py tests/gpu/test_gpu_memory.py)

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if [[ ${MPS:-1} == 1 ]]; then
  export NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES=1 CUDA_DEVICE_MAX_CONNECTIONS=8
  # All kernels that wait must fit on the GPU together: here, on 120 multiprocessors.
  export NUMBA_SYMM_MULTIPROCESSORS=$((120 / together / ranks))
  export CUDA_MPS_PIPE_DIRECTORY=$logs/mps CUDA_MPS_LOG_DIRECTORY=$logs/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

job() { # NAME PYTEST-ARGUMENTS...
  local name=$1 folder=$logs/$1 began=$SECONDS test
  local allowed=$seconds left=$((${LATEST:-86400} - SECONDS))
  shift
  if ((left < 30)); then
    echo "$name: not run, no time is left"
    return 1
  fi
  ((left < allowed)) && allowed=$left
  mkdir -p "$folder"
  timeout -k 10 "$allowed" "${PYTHON:-python3}" -m numba_symm.command.cli run \
    -n "$ranks" tests/rank.py "$folder" $((allowed - 20)) -vs --no-header \
    --no-summary -pno:cacheprovider -pno:faulthandler "$@" \
    > "$folder/mpirun.txt" 2>&1 < /dev/null
  local code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s: $(tail -n 1 "$folder/0.txt")"
  ((code == 0)) && return
  grep -h -E " FAILED|^E  " "$folder"/[0-9]*.txt | head -20
  test=$(grep -h -o -P -m 1 "Exit: \Ktests/.*(?= failed on ranks)" "$folder/0.txt")
  [[ -n $test && $name != *++ ]] && job "$name+" "$@" "--deselect=$test"
  return 1
}

failed=0
for path in "${paths[@]}"; do
  [[ " ${alone[*]} " == *" $path "* ]] && continue
  while (($(jobs -rp | wc -l) >= together)); do
    wait -n || failed=$((failed + 1))
  done
  job "$(basename "$path" .py)" "$path" "${alone[@]/#/--ignore=}" &
done
while [ -n "$(jobs -p)" ]; do
  wait -n || failed=$((failed + 1))
done
for path in "${alone[@]}"; do
  if [[ " ${paths[*]} " == *" $path "* || " ${paths[*]} " == *" ${path%/*} "* ]]; then
    job "$(basename "$path" .py)" "$path" || failed=$((failed + 1))
  fi
done
exit $failed
