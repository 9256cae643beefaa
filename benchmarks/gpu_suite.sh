#!/usr/bin/env bash
# Everything that needs a CUDA machine, in one command: bash benchmarks/gpu_suite.sh FOLDER
# Runs the tests marked cuda and the benchmark of the patches; leaves JUnit, JSON and Markdown in
# FOLDER. Both parts run, whatever the other says; the status is 0 only if both are fine.
set -uo pipefail
folder=${1:?usage: gpu_suite.sh FOLDER}
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"' || exit 2
status=0
"$python" -m pytest tests -m cuda -q --junit-xml="$folder/cuda-tests.xml" \
  >"$folder/cuda-tests.log" 2>&1 || status=1
tail -n 30 "$folder/cuda-tests.log"
"$python" benchmarks/patches.py --output "$folder" >"$folder/patches.log" 2>&1 || status=1
tail -n 80 "$folder/patches.log"
exit $status
