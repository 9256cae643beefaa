#!/usr/bin/env bash
# Run all measurements and tests for a CUDA machine: bash benchmarks/gpu_suite.sh FOLDER [PART...]
# Parts, in their default order: patches (times, distinct outputs and whole models), tests (those
# marked cuda: 1,000 calls of each op), example (the segmentation network, three times), digest,
# probes, audit, paper, graphsage. Each part may take SECONDS_PER_PART (570) and runs even if another
# one fails. FOLDER receives JUnit, JSON, Markdown and logs, and after each part results.tgz with all
# of them. The exit status is 0 only if every part succeeds.
set -uo pipefail
folder=${1:?usage: gpu_suite.sh FOLDER [PART...]}
shift
python=${PYTHON:-python3}
limit=${SECONDS_PER_PART:-570}
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[ $# -gt 0 ] || set -- patches tests example digest probes audit paper graphsage
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu_suite.sh: $python finds no torch with a CUDA device (set PYTHON to another)" >&2
  exit 2
}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" # it need not be installed
export CUBLAS_WORKSPACE_CONFIG=:4096:8                        # products beside a second stream
export PYTHONUNBUFFERED=1                                     # an interrupted part has a log
status=0

run() { # NAME COMMAND...: into NAME.log, within the limit
  local name=$1 code=0
  shift
  echo "== $name"
  # An interruption, unlike SIGTERM, lets pytest write its XML.
  timeout -s INT -k 20 "$limit" "$@" >"$folder/$name.log" 2>&1 || code=$?
  tail -n 60 "$folder/$name.log"
  [ $code -eq 0 ] || {
    echo "gpu_suite.sh: $name ended with status $code" >&2
    status=1
  }
  tar -czf "$folder.new" -C "$folder" --exclude results.tgz . && mv "$folder.new" "$folder/results.tgz"
}

for part; do
  case $part in
  patches)
    run patches "$python" benchmarks/patches.py --output "$folder" --seconds $((limit - 60))
    ;;
  tests)
    # Without the project's settings, which need a new pytest and plugins.
    run tests "$python" -m pytest -c /dev/null --rootdir "$PWD" --import-mode=importlib \
      -o "markers=cuda: needs a CUDA device" -p no:cacheprovider -m cuda -v \
      --junit-xml="$folder/cuda-tests.xml" \
      tests/patches/test_cuda.py tests/hashing/test_xxh3_cuda.py \
      tests/lightning/probing/test_recorder_cuda.py
    ;;
  example)
    run example "$python" -m lightning_d9m repeat -n 3 -o "$folder/segmentation" --json \
      -- "$python" examples/segmentation.py --accelerator gpu
    ;;
  digest)
    run digest "$python" benchmarks/digest.py --device cuda --output "$folder"
    ;;
  probes) # writes each row when it is measured
    run probes "$python" benchmarks/probes.py --device cuda -o "$folder/probes-cuda.json"
    ;;
  audit)
    run audit "$python" -m lightning_d9m audit ops --device cuda --runs 30 -o "$folder/audit"
    ;;
  paper)
    run paper "$python" benchmarks/paper_ops.py --device cuda --output "$folder"
    ;;
  graphsage)
    run graphsage "$python" benchmarks/graphsage.py --device cuda --output "$folder" \
      --limit $((limit - 60))
    ;;
  *)
    echo "gpu_suite.sh: there is no part $part" >&2
    status=2
    ;;
  esac
done
exit $status
