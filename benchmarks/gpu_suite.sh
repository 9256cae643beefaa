#!/usr/bin/env bash
# Everything that needs a CUDA machine, in one command: bash benchmarks/gpu_suite.sh FOLDER
# Runs the tests marked cuda, the benchmarks of patches and digest, the audit of ops and the paper's
# experiments, and the segmentation example thrice;
# leaves JUnit, JSON and Markdown in FOLDER. Every part runs, whatever the others say; the status is
# 0 only if all are fine.
set -uo pipefail
folder=${1:?usage: gpu_suite.sh FOLDER}
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu_suite.sh: $python finds no torch with a CUDA device (set PYTHON to another)" >&2
  exit 2
}
status=0
"$python" -m pytest tests -m cuda -q --junit-xml="$folder/cuda-tests.xml" \
  >"$folder/cuda-tests.log" 2>&1 || status=1
tail -n 30 "$folder/cuda-tests.log"
"$python" benchmarks/patches.py --output "$folder" >"$folder/patches.log" 2>&1 || status=1
tail -n 80 "$folder/patches.log"
"$python" benchmarks/digest.py --device cuda --output "$folder" \
  >"$folder/digest.log" 2>&1 || status=1
tail -n 20 "$folder/digest.log"
"$python" -m lightning_d9m audit ops --device cuda --runs 30 -o "$folder/audit" \
  >"$folder/audit.log" 2>&1 || status=1
tail -n 40 "$folder/audit.log"
for experiment in paper_ops graphsage; do
  "$python" "benchmarks/$experiment.py" --device cuda --output "$folder" \
    >"$folder/$experiment.log" 2>&1 || status=1
  tail -n 40 "$folder/$experiment.log"
done
"$python" -m lightning_d9m repeat -n 3 -o "$folder/segmentation" --json \
  -- "$python" examples/segmentation.py --accelerator gpu >"$folder/segmentation.json" || status=1
tail -n 5 "$folder/segmentation.json"
exit $status
