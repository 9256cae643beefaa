"""Measure ``d9m scan``: recall and precision on the corpus, lines a second on a large tree.

    python benchmarks/scan.py --output benchmarks/results/scan.json [FOLDER ...]

The corpus is tests/lint/corpus, whose lines say what is to be found and what is not. Without
folders the tree is the installed torch and lightning, tests included. The baseline matches the
names of attributes, as torchdetscan 0.1 does; ``--torchdetscan SCRIPT``, an installed
``torchdetscan.py``, also runs that program itself: on the corpus, to say where it differs from the
baseline, and on the tree, for its speed.
"""

import argparse
import json
import platform
import re
import subprocess
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

from attribute_names import match_names

from lightning_d9m.lint.rules import RULES
from lightning_d9m.lint.scanner import scan_file
from lightning_d9m.lint.source import list_files

CORPUS = Path(__file__).parents[1] / "tests" / "lint" / "corpus"
OPS = ("D9M101", "D9M102", "D9M103", "D9M104")


def read_expected(path, rules):
    """Return the lines on which a rule of ``rules`` is expected."""
    marks = re.compile(r"# expect: (.+)$")
    return {
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := marks.search(line)) and set(found[1].split()) & set(rules)
    }


def count_fine():
    """Return how many lines of the corpus are marked as look-alikes."""
    return sum(path.read_text().count("# fine\n") for path in CORPUS.glob("*.py"))


def score(find, rules):
    """Return recall and precision, counted in lines, of a function from a file to its lines."""
    right = found = expected = 0
    for path in sorted(CORPUS.glob("*.py")):
        wanted, got = read_expected(path, rules), set(find(path))
        right += len(wanted & got)
        found += len(got)
        expected += len(wanted)
    return {
        "expected": expected,
        "found": found,
        "right": right,
        "recall": round(right / expected, 3),
        "precision": round(right / found, 3),
    }


def find_ours(rules):
    """Return a function from a file to the lines that d9m scan finds."""

    def find(path):
        scan = scan_file(str(path), frozenset(rules))
        return [finding.line for finding in scan.findings]

    return find


def run_torchdetscan(script, path):
    """Return the lines that torchdetscan's own table names, but not what it says of the flag."""
    done = subprocess.run([script, str(path)], capture_output=True, text=True, check=True)
    rows = re.findall(r"^│\s*(\w+)\s*│\s*(\d+)\s*│", done.stdout, re.MULTILINE)
    return [int(line) for name, line in rows if name != "use_deterministic_algorithms"]


def measure_ours(entries):
    """Return the speed of a scan in one process, in lines of a second of its CPU time."""
    began = time.process_time()
    scans = [scan_file(entry, frozenset(RULES)) for entry in entries]
    seconds = time.process_time() - began
    lines = sum(scan.lines for scan in scans)
    return {
        "files": len(entries),
        "lines": lines,
        "seconds": round(seconds, 2),
        "lines_per_second": round(lines / seconds),
        "findings": sum(len(scan.findings) for scan in scans),
    }


def measure_baseline(entries):
    """Return the speed of the baseline, reading included and printing not."""
    lines = 0
    began = time.process_time()
    for entry in entries:
        text = Path(entry).read_text(encoding="utf-8")
        lines += text.count("\n") + 1
        try:
            match_names(text)
        except SyntaxError:
            continue
    seconds = time.process_time() - began
    return {"seconds": round(seconds, 2), "lines_per_second": round(lines / seconds)}


_LINT_ALL = """
import io, json, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import torchdetscan
torchdetscan.always_nondeterministic = torchdetscan.nondeterministic_registry["2.3"]
torchdetscan.conditionally_nondeterministic = torchdetscan.deterministic_registry["2.3"]
torchdetscan.console.file = io.StringIO()
refused, began = 0, time.process_time()
for name in json.load(sys.stdin):
    try:
        torchdetscan.lint_file(Path(name))
    except (SyntaxError, UnicodeDecodeError):
        refused += 1
print(json.dumps({"seconds": time.process_time() - began, "refused": refused}))
"""


def measure_torchdetscan(script, entries, lines):
    """Return the speed of torchdetscan itself, printing into memory.

    It is called file by file, since it ends at the first file that does not parse.
    """
    python = Path(script).with_name("python")
    done = subprocess.run(
        [str(python), "-c", _LINT_ALL, script],
        input=json.dumps([str(Path(entry).absolute()) for entry in entries]),
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    return {
        "seconds": round(result["seconds"], 2),
        "lines_per_second": round(lines / result["seconds"]),
        "ends_at_files": result["refused"],
    }


def main():
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--torchdetscan", metavar="SCRIPT")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    folders = arguments.folders or [
        Path(find_spec(name).origin).parent for name in ("torch", "lightning")
    ]
    result = {
        "corpus": {
            "look_alikes": count_fine(),
            "ops": {
                "d9m scan": score(find_ours(OPS), OPS),
                "attribute names": score(lambda path: match_names(path.read_text()), OPS),
            },
            "all": {
                "d9m scan": score(find_ours(RULES), RULES),
                "attribute names": score(lambda path: match_names(path.read_text()), RULES),
            },
        }
    }
    if arguments.torchdetscan:
        result["torchdetscan_differs_from_baseline"] = [
            path.name
            for path in sorted(CORPUS.glob("*.py"))
            if set(run_torchdetscan(arguments.torchdetscan, path))
            != set(match_names(path.read_text()))
        ]
    entries = list(list_files(folders))
    result["speed"] = {
        "python": platform.python_version(),
        "tree": [folder.name for folder in folders],
        "d9m scan": measure_ours(entries),
        "attribute names": measure_baseline(entries),
    }
    if arguments.torchdetscan:
        lines = result["speed"]["d9m scan"]["lines"]
        result["speed"]["torchdetscan"] = measure_torchdetscan(
            arguments.torchdetscan, entries, lines
        )
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
