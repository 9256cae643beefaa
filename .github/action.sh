#!/usr/bin/env bash
# The main step of action.yml: run the training, compare, write the summary and the report.
# Reads COMMAND, RUNS, GOLDEN and OUTPUT; exits with the status of the first comparison that fails.
set -uo pipefail

summary=${GITHUB_STEP_SUMMARY:-/dev/stdout}
outputs=${GITHUB_OUTPUT:-/dev/null}

# The command is words for a shell, as a job's "run" is.
d9m repeat -n "$RUNS" -o "$OUTPUT" --format markdown -- bash -c "$COMMAND" > repeat.md
status=$?
cat repeat.md >> "$summary"
verdict=$(sed -n '1s/^\*\*\(.*\)\*\*.*/\1/p' repeat.md)
rm -f repeat.md

if [ -d "$OUTPUT/run-001" ]; then
  d9m report "$OUTPUT" -o "$OUTPUT/report.html" --force
fi
if [ "$status" = 0 ] && [ -n "$GOLDEN" ]; then
  { echo; echo "## Compared with $GOLDEN"; echo; } >> "$summary"
  d9m compare "$GOLDEN" "$OUTPUT/run-001" --format markdown > compare.md
  status=$?
  cat compare.md >> "$summary"
  verdict=$(sed -n '1s/^\*\*\(.*\)\*\*.*/\1/p' compare.md)
  rm -f compare.md
fi
echo "verdict=${verdict:-failed}" >> "$outputs"
exit "$status"
