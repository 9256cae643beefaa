#!/usr/bin/env bash
# Run all measurements and tests for a CUDA machine: bash benchmarks/gpu_suite.sh FOLDER [PART...]
# Call it again with the same FOLDER while its exit status is 3. See gpu/gpu_suite.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/gpu_suite.py" "$@"
