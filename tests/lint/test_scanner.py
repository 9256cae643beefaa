"""What is marked in the corpus is found; suppressions are checked; fixes are right.

``# expect: RULE RULE`` marks a finding, ``# fine`` a line without one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_d9m.tools.lint.rules import RULES
from lightning_d9m.tools.lint.scanner import fix_text, scan_file

FILES = sorted(Path(__file__).with_name("corpus").glob("*.py"))


def read_marks(path):
    """Return the expected (line, rule) pairs of a file, and the lines that must give nothing."""
    expected, fine = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(r"# expect: (.+)$", line):
            expected += [(number, rule) for rule in found[1].split()]
        elif line.endswith("# fine"):
            fine.append(number)
    return expected, fine


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_the_corpus_gives_what_its_marks_say(path):
    expected, fine = read_marks(path)
    found = {(f.line, f.rule) for f in scan_file(str(path), frozenset(RULES)).findings}
    assert found == set(expected)
    assert not {line for line, _ in found} & set(fine)


def test_the_corpus_is_large_enough():
    """At least 60 findings and 60 look-alikes; every rule of a program's source is in it."""
    marks = [read_marks(path) for path in FILES]
    expected = [rule for pairs, _ in marks for _, rule in pairs]
    assert len(expected) >= 60
    assert sum(len(fine) for _, fine in marks) >= 60
    assert set(RULES) - set(expected) == {"D9M001", "D9M002", "D9M003"}


LINE = "import random\nrandom.seed()"


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        (f"{LINE}  # d9m: ignore[D9M204] a game, not a training\n", []),
        # Alone on its line, for the next code; and within a call of several lines.
        ("import random\n# d9m: ignore[D9M204] a game\n\nrandom.seed(\n)\n", []),
        ("import random\nrandom.seed(\n    None  # d9m: ignore[D9M204] a game\n)\n", []),
        (f"{LINE}  # d9m: ignore[D9M204]\n", ["D9M002", "D9M204"]),
        (f"{LINE}  # d9m: ignore a reason\n", ["D9M002", "D9M204"]),
        (f"{LINE}  # d9m: ignore[D9M999] a reason\n", ["D9M002", "D9M204"]),
        (f"{LINE}  # d9m: noqa[D9M204] a reason\n", ["D9M002", "D9M204"]),
        (f"{LINE}  # d9m: ignore[D9M301] a reason\n", ["D9M003", "D9M204"]),
        (f"{LINE}  # d9m: ignore[D9M204, D9M301] a reason\n", ["D9M003"]),
        ("x = '# d9m: ignore[D9M204] reason'\n", []),
    ],
)
def test_a_suppression_needs_a_rule_and_a_reason_and_something_to_suppress(scan, source, rules):
    assert sorted(rule for _, rule in scan(source)) == rules


HEAD = "import glob, os, random, torch\nimport numpy as np\nfrom pathlib import Path\n"
FIXED = {
    "rng = np.random.default_rng()": "rng = np.random.default_rng(0)",
    "rng = np.random.RandomState(seed=None)": "rng = np.random.RandomState(0)",
    "random.seed()": "random.seed(0)",
    "torch.seed()": "torch.manual_seed(0)",
    "torch.cuda.seed_all()": "torch.cuda.manual_seed_all(0)",
    "g = torch.Generator()\ng.seed()": "g = torch.Generator()\ng.manual_seed(0)",
    "files = [n for n in os.listdir('ä')]": "files = [n for n in sorted(os.listdir('ä'))]",
    "files = list(Path('.').glob(\n    '*.py'\n))": (
        "files = list(sorted(Path('.').glob(\n    '*.py'\n), key=repr))"
    ),
    "files = [e.name for e in os.scandir('.')]": (
        "files = [e.name for e in sorted(os.scandir('.'), key=repr)]"
    ),
    "names = list({'b', 'a'})": "names = list(sorted({'b', 'a'}, key=repr))",
    "names = {'b', 'a'}\nfor name in names: print(np.random.rand(), name)": (
        "names = {'b', 'a'}\nfor name in sorted(names, key=repr): print(np.random.rand(), name)"
    ),
    "all = [*{f'{np.random.default_rng()}', 'a'}]": (
        "all = [*sorted({f'{np.random.default_rng(0)}', 'a'}, key=repr)]"
    ),
}
LEFT = (
    "seed = torch.seed()",
    "rng = np.random.SeedSequence(None, spawn_key=(1,))",
    "torch.manual_seed(os.getpid())",
    "names = list({'b', 1})",
    "names = list(set(os.environ))",
    "with os.scandir('.') as found:\n    names = [one.name for one in found]",
    "for folder, inner, files in os.walk('.'): print(list(files), np.random.rand())",
    "names = list({'b', 'a'})  # d9m: ignore[D9M301] they are counted",
    # What takes the iterable needs an iterator, and not a list.
    "first = next(Path('.').iterdir())",
    "found = Path('.').glob('*')\nfirst = next(found)",
    "async def f(path): return [one async for one in path.iterdir()]",
    "async def f(path):\n    async for one in path.iterdir(): yield one",
    "def f(folder, sorted): return list(os.listdir(folder))",
    # It may be called for each sample, whose noise would be the same.
    "def noisy(x): return x + np.random.default_rng().normal()",
    "streams = [np.random.default_rng() for _ in range(4)]",
    "for _ in range(4): random.seed()",
    "loader = torch.utils.data.DataLoader([], worker_init_fn=lambda n: np.random.seed())",
    # It also seeds the main process.
    (
        "def seed_all(n=3): np.random.seed(3)\nseed_all()\n"
        "torch.utils.data.DataLoader([], worker_init_fn=seed_all)"
    ),
)


def fix(text):
    return fix_text(f"{HEAD}{text}\n", "a.py", frozenset(RULES)).after.removeprefix(HEAD)


@pytest.mark.parametrize("text", FIXED | dict.fromkeys(LEFT))
def test_one_right_answer_is_written_and_several_are_left(text):
    fixed = FIXED.get(text, text)
    assert fix(text) == fix(fixed) == f"{fixed}\n"


PROGRAM = """\
import os
import random
import numpy as np

labels = {f"label-{number}" for number in range(20)}
numbers = {label: number for number, label in enumerate(labels)}
places = np.cumsum([len(name) for name in os.listdir(".")])
print(sorted(numbers.items()), places[-1])
print(np.random.default_rng().random(), random.Random().random())
"""


def test_what_is_sorted_needs_no_order(tmp_path, d9m):
    """Neither paths of an archive nor None, which a set may get later, compare with others."""
    path = tmp_path / "program.py"
    path.write_text(
        "import io, os, zipfile\n"
        "file = io.BytesIO()\n"
        "with zipfile.ZipFile(file, 'w') as archive:\n"
        "    for name in ('b', 'a'): archive.writestr(name, '')\n"
        "print([one.name for one in zipfile.Path(file).iterdir()][:9])\n"
        "tags = {'a', 'b'}\n"
        "tags.add(None)\n"
        "print(list(tags)[:9], [one.name for one in os.scandir('.')][:9])\n"
    )
    assert "fixed: 3 findings" in d9m("scan", "--fix", path)[2]
    shown = subprocess.check_output((sys.executable, path), cwd=tmp_path, text=True)
    assert shown == "['a', 'b']\n['a', 'b', None] ['program.py']\n"


def test_a_fixed_program_prints_the_same_in_each_run(tmp_path, monkeypatch, d9m):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"
    path.write_bytes(PROGRAM.replace("\n", "\r\n").encode())

    def outputs():
        run = (sys.executable, path)
        seeds = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in (1, 2)]
        return {subprocess.check_output(run, env=environment) for environment in seeds}

    assert len(outputs()) == 2
    status, shown, _ = d9m("scan", "--diff")
    assert status == 1
    assert (
        "+numbers = {label: number for number, label in enumerate(sorted(labels, key=repr))}\n"
        in shown
    )
    assert len(outputs()) == 2
    status, shown, err = d9m("scan", "--fix")
    assert status == 0
    assert "fixed: 4 findings in 1 file" in err
    assert shown.startswith("0 found in 1 file")
    assert path.read_bytes().count(b"\r\n") == PROGRAM.count("\n")
    assert len(outputs()) == 1
    assert d9m("scan", "--diff")[0] == 0


def test_a_file_that_cannot_be_written_is_said(tmp_path, monkeypatch, d9m):
    (tmp_path / "a.py").write_text(f"{HEAD}random.seed()\n")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("full")))
    status, _, err = d9m("scan", tmp_path, "--fix")
    assert status == 2
    assert "cannot be fixed: full. Make it writable" in err
