"""Measure ``d9m bisect`` on a git repository with 64 commits of the digits example.

    python benchmarks/bisection.py --output benchmarks/results/bisect.json

The commits edit a comment of examples/digits.py, one of them also the computation; three do not
run. Two searches: whole trainings, where the last commit is the guilty one, so that all others
train to their end; and ``--until 0``, with the guilty one in the middle. The status is 1 if an
answer is wrong or a search takes longer than three minutes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
GOAL_SECONDS = 180.0
RIGHT = "torch.optim.AdamW(self.parameters(), lr="
OTHER = "torch.optim.AdamW(self.parameters(), weight_decay=0.02, lr="
BROKEN = "raise SystemExit(3)\n"


def run_git(folder, *words):
    """Run git as an author of its own; return what it prints."""
    names = {
        f"GIT_{who}_{what}": "d9m" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "commit.gpgsign=false", *words],
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def make_repository(folder, commits, guilty):
    """Commit the example once, and then as often as ``commits`` says; return the names of all."""
    run_git(folder, "init", "--quiet")
    example = DIGITS.read_text()
    assert RIGHT in example, "the example has this line"
    # Among them are the first ones that the search chooses; the guilty one and the one before run.
    broken = {commits // 2, commits // 4, 3 * commits // 4} - {guilty - 1, guilty}
    names = []
    for number in range(commits + 1):
        text = example if number < guilty else example.replace(RIGHT, OTHER)
        text = BROKEN if number in broken else text
        (folder / "digits.py").write_text(f"{text}# Change {number}\n")
        run_git(folder, "add", ".")
        run_git(folder, "commit", "--quiet", "-m", f"Change {number}")
        names.append(run_git(folder, "rev-parse", "HEAD"))
    return names


def search(commits, guilty, *options, epochs):
    """Make a repository, search it, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="d9m-benchmark-") as name:
        project, output = Path(name, "digits"), Path(name, "output")
        project.mkdir()
        names = make_repository(project, commits, guilty)
        began = time.perf_counter()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lightning_d9m", "bisect", "--json", "-o", str(output)),
                *(*options, f"{names[0]}..{names[-1]}", "--"),
                *(sys.executable, "digits.py", "--epochs", str(epochs)),
            ],
            cwd=project,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
    facts = json.loads(done.stdout or "{}")
    trials = facts.get("trials", [])
    return {
        "commits": facts.get("commits"),
        "epochs": epochs,
        "options": list(options),
        "guilty": guilty,
        "right": [one["sha"] for one in facts.get("candidates", [])] == [names[guilty]],
        "seconds": round(seconds, 1),
        "trainings": len(trials),
        "verdicts": dict(Counter(trial["verdict"] for trial in trials)),
        "seconds_of_trainings": [round(trial["seconds"], 1) for trial in trials],
    }


def main():
    """Search twice, print and write; return 1 if an answer is wrong or late."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    commits, epochs = arguments.commits, arguments.epochs
    result = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "lightning_d9m")},
        "cpu": len(os.sched_getaffinity(0)),
        "goal_seconds": GOAL_SECONDS,
        "whole trainings": search(commits, commits, epochs=epochs),
        "until epoch 0": search(commits, 5 * commits // 8 + 1, "--until", "0", epochs=epochs),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(f"{text}\n")
    searches = [part for part in result.values() if isinstance(part, dict)]
    return int(not all(part["right"] and part["seconds"] <= GOAL_SECONDS for part in searches))


if __name__ == "__main__":
    sys.exit(main())
