"""``d9m report`` writes one offline file with every fact and escapes every value of a ledger."""

import re
import shutil
import subprocess
from html import unescape

import pytest
from ledger_runs import make_facts, make_probes, make_weights, write_rank

from lightning_d9m.engine.ledger.folder import create_ledger_folder

EVIL = [
    "<script>alert(1)</script>",
    "\"&'",
    "x" * 3000,
    "\u202egnp.exe",
    "\u05d0\u05d1.weight",
    "</style><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "\x1b[31m\x00",
]
MODULES = ["encoder.layers.0.norm", "encoder.layers.0.linear", "encoder.layers.1.linear", "head"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def write(
    parent, *, steps=12, drift=None, growth=2, names=MODULES, stack="560.35", folder=None, **changes
):
    """Write one rank of a run; from step ``drift`` on, ``growth`` more places differ each step."""
    places = [("batch", "0"), *(("output", name) for name in names), ("loss", "loss")]
    places += [("gradient", f"{name}.weight") for name in reversed(names)]
    batches = []
    for step in range(steps):
        other = 0 if drift is None or step < drift else (step - drift + 1) * growth
        batches.append([255 * (number + other >= len(places)) for number in range(len(places))])
    records = [make_facts(), *make_probes(places, batches)]
    weight = "0" if drift is None or drift >= steps else "f"
    weights = {f"{name}.weight": weight * 32 for name in names}
    records.append(make_weights("epoch", 0, weights, step=steps, loss=(0.5).hex()))
    folder = folder or create_ledger_folder(parent)
    return write_rank(folder, records, stack={"device.driver": stack}, **changes)


def write_losses(parent, losses, *, digit="0", program=None, folder=None):
    """Write a run with one epoch for each loss, and a logged value that is half of it."""
    records = []
    for epoch, loss in enumerate(losses):
        values = {"loss": loss.hex(), "scalars": {"val_<b>": (loss / 2).hex()}}
        values["totals"] = {"weights": digit * 32}
        moments = ("epoch", "final")[: 2 if epoch == len(losses) - 1 else 1]
        records += [make_weights(moment, epoch, {"a": digit * 32}, **values) for moment in moments]
    created, stack = "2026-11-22T19:18:44.311245+00:00", {"torch.version": "2.13.0"}
    folder = folder or create_ledger_folder(parent)
    return write_rank(folder, records, created=created, program=program or {}, stack=stack)


class Page:
    """The tags of a page, the names of their attributes, and its words."""

    def __init__(self, text):
        self.tags = re.findall(r"<(/?\w+)", text)
        self.attributes = set(re.findall(r" ([\w-]+)=\"", text))
        shown = re.sub(r"<style>.*?</style>|<wbr>", "", text, flags=re.DOTALL)
        self.words = " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


@pytest.fixture
def report(d9m, tmp_path):
    """Return a function that writes a report and returns its text."""

    def run(*words, status=1):
        path = tmp_path / "report.html"
        assert d9m("report", *words, "-o", path)[0] == status
        return path.read_text()

    return run


def test_different_runs(tmp_path, d9m):
    one, other = write(tmp_path), write(tmp_path, drift=8, stack="570.1")
    status, out, _ = d9m("report", one, other, "-o", tmp_path / "report.html")
    assert status == 1
    assert out.startswith("different: the report is")
    words = Page((tmp_path / "report.html").read_text()).words
    assert "Different" in words
    assert "First divergence: batch 8 of epoch 0 (step 8) , gradient" in words
    assert "gradient: 2 of 4 differ" in words
    assert "The stacks differ, which alone may change results: device.driver" in words
    assert "device.driver reference: 560.35 this run: 570.1" in words
    assert "Cause: stack." in words


def test_the_title_has_no_tags(tmp_path, report):
    folder = tmp_path / "<b>.läuft"
    folder.mkdir()
    text = report(write(folder), write(folder, drift=8))
    title = text.partition("<title>")[2].partition("</title>")[0]
    assert "<" not in title
    assert "&lt;b&gt;.läuft" in title


# How two runs are written, and what their page says and does not say.
PAGES = {
    "digest of equal weights": (
        lambda folder: (write_losses(folder, [1.0]), write_losses(folder, [1.0])),
        [f"Weights of both runs: {'0' * 32}"],
        ["All that differs"],
    ),
    "another stack and portable bits": (
        lambda folder: [
            write(folder, drift=drift, stack=stack, settings={"portable": True})
            for drift, stack in ((None, "560"), (8, "570"))
        ],
        ["portable bits do not depend on them: device.driver", "Next: d9m locate"],
        ["Cause: stack."],
    ),
    "a module of one run": (
        lambda folder: (write(folder), write(folder, names=[*MODULES, "extra"], drift=2)),
        ["only this run has 24 probes in batches of both, the first output extra in"],
        [],
    ),
    "other world sizes": (
        lambda folder: (write(folder), write(folder, world_size=2)),
        ["Not comparable", "world_size reference: 1 this run: 2 A different number of ranks"],
        ["All that differs"],
    ),
}


@pytest.mark.parametrize(("make", "said", "unsaid"), PAGES.values(), ids=PAGES)
def test_a_page_says(tmp_path, make, said, unsaid, report):
    equal = any(line.startswith(("Equal", "Weights of both")) for line in said)
    words = Page(report(*make(tmp_path), status=0 if equal else 1)).words
    assert [line for line in said if line not in words] == []
    assert [line for line in unsaid if line in words] == []


def test_what_ran_and_the_logged_values_are_shown(tmp_path, report):
    program = {"command": "python 'a <b>.py'", "git.commit": "abc123", "git.dirty": True}
    one = write_losses(tmp_path, [1.0, 0.5, 0.25], program=program)
    other = write_losses(tmp_path, [1.0, 0.5001, float("nan")], digit="f", program=program)
    text = report(one, other)
    words = Page(text).words
    assert "command python 'a <b>.py' python 'a <b>.py' commit abc123, with changes abc" in words
    assert "Next: d9m locate -- python 'a <b>.py' narrows this down" in words
    assert "date 2026-11-22 19:18:44 UTC" in words
    assert "torch 2.13.0 2.13.0" in words
    assert "loss 18 0.5 0.5001 0.0001 18 " in words
    assert "val_<b> 18 0.25 0.25005 5e-05 18 " in words


def test_all_runs_of_a_repeat_are_shown(tmp_path, report):
    for number, loss in ((1, 0.5), (2, 0.5), (3, 0.25)):
        folder = tmp_path / f"run-{number:03d}" / "fit-000"
        folder.mkdir(parents=True)
        write_losses(tmp_path, [1.0, loss], digit=str(number // 3), folder=folder)
    words = Page(report(tmp_path)).words
    assert "Different: 1 of 3 runs differs from run 1. Run 3: " in words
    assert f"verdict 1 42 {'0' * 16} 0.5 reference" in words
    assert f"equal 3 42 {'1' * 16} 0.25 differs" in words
    assert "loss 18 0.5 0.25 0.25 18 " in words
    assert "run-003/fit-000" in words


def test_evaluations_of_a_repeat_are_compared(tmp_path, report):
    """What a program saved differs, and its fits are equal."""
    for number in (1, 2):
        for kind, digit in (("fit", "0"), ("saved", str(number))):
            folder = tmp_path / f"run-{number:03d}" / f"{kind}-000"
            folder.mkdir(parents=True)
            write_losses(tmp_path, [1.0], digit=digit, folder=folder)
    words = Page(report(tmp_path)).words
    assert "Different: 1 of 2 runs differs from run 1. Run 2, " in words
    assert "run-002/saved-000" in words


def test_names_are_escaped_and_nothing_is_loaded(tmp_path, report):
    """The page has the tags and attributes of one with harmless names; its policy forbids loads."""
    tame = [
        "".join(c if c in ".:/" else "abcdefgh"[number] for c in name)
        for number, name in enumerate(EVIL)
    ]
    texts = []
    for names in (tame, EVIL):
        one = write(tmp_path, names=names)
        other = write(tmp_path, names=names, drift=2, stack=names[0])
        texts.append(report(one, other).replace("<bdi>", "").replace("</bdi>", ""))
    tame_page, evil_page = map(Page, texts)
    assert sorted(evil_page.tags) == sorted(tame_page.tags)
    assert evil_page.attributes == tame_page.attributes
    assert not {"link", "img", "iframe", "object"} & set(evil_page.tags)
    assert not {"src", "href", "action"} & evil_page.attributes
    assert "default-src 'none'" in texts[1]
    assert "<script>alert(1)</script>" in evil_page.words
    assert not {"\u202e", "\x1b", "\x00"} & set(texts[1])
    assert "x" * 500 not in texts[1]


def test_the_size_is_bounded(tmp_path, report):
    """Omitted entries are counted."""
    names = [f"layers.{number}.{'n' * 100}" for number in range(3000)]
    one = write(tmp_path, names=names, steps=1)
    other = write(tmp_path, names=names, steps=1, drift=0, growth=10_000)
    text = report(one, other)
    assert len(text) < 2_000_000
    assert "3,002 more are left out." in text


def test_a_file_that_is_not_a_report_is_kept(tmp_path, d9m):
    """``--force`` replaces it; an earlier report is always replaced."""
    one, path = write(tmp_path), tmp_path / "report.html"
    path.write_text("my thesis")
    status, _, err = d9m("report", one, one, "-o", path)
    assert (status, path.read_text()) == (2, "my thesis")
    assert re.search(r"is not a report of lightning_d9m.*--force", err)
    assert d9m("report", one, one, "-o", path, "--force")[0] == 0
    assert d9m("report", one, one, "-o", path)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "-o", "no/report.html"], "in a folder that does not exist"),
        (["a", "b", "-o", "."], "is a folder"),
        (["text", "fit-000"], "is not a ledger"),
        (["gone", "fit-000"], "The ledger gone cannot be opened: No such file"),
        (["repeat"], "holds run 1 of a `d9m repeat` and no run to compare"),
    ],
)
def test_wrong_words_are_one_clear_error(tmp_path, monkeypatch, d9m, words, message):
    """The error comes before the work."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "text").write_text("x")
    only = tmp_path / "repeat" / "run-001" / "fit-000"
    only.mkdir(parents=True)
    write_losses(tmp_path, [1.0], folder=only)
    status, _, err = d9m("report", *words)
    assert status == 2
    assert message in err
    assert not (tmp_path / "report.html").exists()


# What a reader sees on a phone; it goes into the title.
READER = """
var root = document.documentElement, seen = [root.scrollWidth <= root.clientWidth];
seen.push(root.clientWidth < 600);
seen.push(Array.prototype.every.call(document.querySelectorAll(".scroll"), function (box) {
  return box.offsetHeight < 700 && box.getAttribute("aria-label");
}));
document.title = seen.join(";");
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (the command chromium)")
def test_a_narrow_window(tmp_path, report):
    """In a real browser, nothing is too wide."""
    names = [f"layers.{number}.block" for number in range(40)] + MODULES + ["x" * 3000]
    one, other = (write(tmp_path, names=names, drift=drift, growth=47) for drift in (None, 2))
    text = report(one, other)
    policy = text[text.index("<meta http-equiv") :].partition(">")[0] + ">"
    text = text.replace(policy, "").replace("</body>", f"<script>{READER}</script></body>")
    (tmp_path / "page.html").write_text(text)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=412,800"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path}/page.html"]
    dom = subprocess.check_output([CHROMIUM, *options], text=True, timeout=120)
    assert dom.partition("<title>")[2].partition("</title>")[0] == "true;true;true"
