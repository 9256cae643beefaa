#!/usr/bin/env bash
# The main step of action.yml: run the training, compare, write the summary and the reports.
# Reads COMMAND, RUNS, GOLDEN and OUTPUT; exits with the status of the first comparison that fails.
# The summary is also in the file OUTPUT.md, for a comment.
set -uo pipefail

summary=$OUTPUT.md
: > "$summary"
trap 'cat "$summary" >> "${GITHUB_STEP_SUMMARY:-/dev/stdout}"; rm -f "$printed"' EXIT
outputs=${GITHUB_OUTPUT:-/dev/null}
# Not in the working folder, which is the project's.
printed=$(mktemp)

# Add a title and what a command prints to the summary; set `status` and `verdict`.
summarize() {
  local title=$1
  shift
  "$@" > "$printed"
  status=$?
  verdict=$(sed -n '1s/^\*\*\(.*\)\*\*.*/\1/p' "$printed")
  if [ -z "$verdict" ]; then
    verdict=failed
    echo "**failed**: the log of this step says why." > "$printed"
  fi
  { printf '## %s\n\n' "$title"; cat "$printed"; echo; } >> "$summary"
}

# Write a comparison as a page, and say in the summary where it is.
write_page() {
  local page=$1
  shift
  d9m report "$@" -o "$OUTPUT/$page" --force
  printf 'The artifact `%s` has this as a page: `%s`.\n\n' "${OUTPUT##*/}" "$page" >> "$summary"
}

# Pack the ledgers that differ, and add what the bundle shows; `status` and `verdict` stay.
pack() {
  (summarize "For a bug report" d9m bundle "$@" -o "$OUTPUT/bundle.zip" --format markdown)
  printf 'The artifact `%s` has this as a file: `bundle.zip`.\n\n' "${OUTPUT##*/}" >> "$summary"
}

# The command is words for a shell, as a job's "run" is.
summarize "$RUNS runs compared" \
  d9m repeat -n "$RUNS" -o "$OUTPUT" --format markdown -- bash -c "$COMMAND"
if [ "$verdict" != failed ]; then
  write_page report.html "$OUTPUT"
fi
if [ "$verdict" = different ]; then
  printf 'Next: `d9m locate -- %s` finds the step, module and source line.\n\n' "$COMMAND" >> "$summary"
  pack "$OUTPUT"
fi
if [ "$status" = 0 ] && [ -n "$GOLDEN" ]; then
  summarize "Compared with $GOLDEN" \
    d9m compare "$GOLDEN" "$OUTPUT/run-001" --format markdown
  if [ "$verdict" != failed ]; then
    write_page golden.html "$GOLDEN" "$OUTPUT/run-001"
  fi
  if [ "$verdict" = different ]; then
    pack "$GOLDEN" "$OUTPUT/run-001"
  fi
fi
echo "verdict=$verdict" >> "$outputs"
exit "$status"
