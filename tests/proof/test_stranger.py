"""A stranger accepts the proof of an honest training, and each lie is rejected with its place.

Signatures are verified by the command of another package, too.
"""

import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.tools.proof.training import hash_tree
from lightning_d9m.tools.segments.check import CheckedSegment

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/segments"))

import wrong_runs as measured


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a private key and its public key, made by another package."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    folder, key = tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "private.pem").write_bytes(private)
    (folder / "public.pem").write_bytes(public)
    return {name: folder / f"{name}.pem" for name in ("private", "public")}


@pytest.fixture(scope="module", autouse=True)
def hashed_once():
    """Read the files of each installed package once for all tests: torch has 700 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_d9m.tools.proof.training.hash_tree", cache(hash_tree))
        found = cache(packages_distributions)
        patch.setattr("lightning_d9m.tools.proof.training.packages_distributions", found)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory, forking_python):
    """Return a function that returns a folder with program and run, in which one thing is wrong."""
    made = {}

    def train(wrong=""):
        if wrong not in made:
            # As deep as the folder of a stranger: a file outside of both has one path from each.
            folder, given = tmp_path_factory.mktemp("published"), {"LIGHTNING_D9M_PROVABLE": "1"}
            made[wrong] = measured.publish(forking_python, folder, wrong, **given)
        return made[wrong]

    return train


@pytest.fixture
def stranger(published, tmp_path, monkeypatch):
    """Return a function that copies what is published to the working folder of a stranger."""
    for name, value in measured.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)

    def receive(wrong=""):
        shutil.copytree(published(wrong), tmp_path, dirs_exist_ok=True)

    return receive


@pytest.fixture
def prove(d9m, stranger):
    """Return a function that proves a run in the working folder."""

    def run(*options, wrong=""):
        stranger(wrong)
        status, _, errors = d9m("prove", "run", "--model", "run/saved/step=60.ckpt", *options)
        assert status == 0, errors
        return json.loads(Path("proof.json").read_text())

    return run


@pytest.fixture
def check(d9m, forking_python):
    """Return a function that checks the proof with the program in the working folder."""

    def run(*options, program="train.py"):
        command = ("--json", "--", forking_python, program, "again")
        status, out, errors = d9m("check", "proof.json", *options, *command)
        assert out, errors
        return status, json.loads(out)

    return run


def edit(proof, path="proof.json"):
    Path(path).write_text(json.dumps(proof))


def forge(path):
    """Change one bit of a signature."""
    bundle = json.loads(path.read_text())
    (own,) = bundle["dsseEnvelope"]["signatures"]
    raw = bytearray(b64decode(own["sig"]))
    raw[-1] ^= 1
    own["sig"] = b64encode(raw).decode()
    path.write_text(json.dumps(bundle))


def test_a_stranger_verifies_and_a_third_party_verifies_the_verdict(prove, check, d9m, keys):
    private, public = (f"key --{name}_key {key}" for name, key in keys.items())
    prove("--sign", private)
    other = [sys.executable, "-m", "model_signing", "verify", *public.split()]
    other += ["--signature", "proof.json.sig", "proof.json"]
    subprocess.run(other, check=True, capture_output=True)
    options = ("--segments", "1", "--choose", "7", "--verdict", "verdict.json", "--sign", private)
    status, found = check("--signer", public, *options)
    assert (status, found["problems"], found["choice"]) == (0, [], 7)
    assert [own["verdict"] for own in found["checked"]] == ["equal"]

    def verify(*words):
        return d9m("verify", "verdict.json", "proof.json", *words)[:2]

    equal = "LIGHTNING_D9M_SEGMENTS_EQUAL_1_OF_4_CHOSEN_BY_"
    status, said = verify("--signer", public, "--choose", "7")
    assert status == 0
    assert f"holds: {equal}7." in " ".join(said.split())
    verdict = json.loads(Path("verdict.json").read_text())
    assert verdict["predicate"]["properties"] == [f"{equal}7"]
    said = verdict["predicate"]["urn:lightning-d9m:check:1"]
    assert [own["verdict"] for own in said["checked"]] == ["equal"]
    assert said["checked"][0]["ledgers"] == [] != found["checked"][0]["ledgers"]
    assert said["output"] == said["run"] == ""
    assert any("does not commit to: validation data" in note for note in said["notes"])
    signature = Path("verdict.json.sig").read_text()
    for wrong in (lambda: forge(Path("verdict.json.sig")), Path("verdict.json.sig").unlink):
        wrong()
        status, _, errors = d9m("verify", "verdict.json", "proof.json", "--signer", public)
        assert status == 2
        assert "does not verify verdict.json" in " ".join(errors.split())
    Path("verdict.json.sig").write_text(signature)
    # A replayed verdict: one of another check, on another proof, edited, or without its signature.
    status, said = verify("--choose", "8")
    assert status == 1
    assert f"not chosen with 8: {equal}7" in said
    checked = verdict["predicate"]["urn:lightning-d9m:check:1"]["checked"]
    checked[0]["number"] = 3 - checked[0]["number"]  # one that was easier to pass
    edit(verdict, "chosen")
    status, said = d9m("verify", "chosen", "proof.json", "--choose", "7")[:2]
    assert status == 1
    assert f"Its segments are not those that 7 chooses: [{checked[0]['number']}]" in said
    checked[0]["number"] = 3 - checked[0]["number"]
    verdict["predicate"]["properties"] = [f"{equal}8"]
    edit(verdict, "verdict.json")
    status, _, errors = d9m("verify", "verdict.json", "proof.json", "--signer", public)
    assert status == 2
    assert "does not verify verdict.json" in " ".join(errors.split())
    none = f"{equal}7".replace("1_OF", "0_OF")
    for wrong in ([], [f"{equal}8", "X_CHOSEN_BY_7"], [equal, "7"], [none]):
        verdict["predicate"]["properties"] = wrong
        edit(verdict, "verdict.json")
        assert "does not say that the run is equal" in verify()[1]
    edit(json.loads(Path("proof.json").read_text()))  # the same statement in other bytes
    assert "on another file than proof.json" in verify()[1]


@pytest.mark.parametrize(
    ("wrong", "verdict", "said"),
    [
        ("label", "persistent", "step 16"),
        ("other data", "persistent", "step 16"),
        ("one sample more", "refused", "other settings than the run: "),
    ],
)
def test_a_training_on_other_data_is_rejected_by_its_segment(prove, check, wrong, verdict, said):
    """All parts of its proof fit each other."""
    prove(wrong=wrong)
    status, found = check("--only", "0")
    assert (status, found["problems"]) == (1, [])
    (segment,) = found["checked"]
    assert (segment["verdict"], segment["equal_until"]) == (verdict, 0)
    assert said in segment["where" if verdict == "persistent" else "reason"], segment


def test_records_that_are_made_again_with_all_hashes_are_rejected_by_their_segment(
    prove, check, tmp_path
):
    prove()
    measured.list_lies(tmp_path)["records, checks and their hash made again"](tmp_path)
    status, found = check("--only", "1")
    assert (status, found["problems"]) == (1, [])
    (segment,) = found["checked"]
    assert (segment["verdict"], segment["equal_until"]) == ("persistent", 20)
    assert "step 31" in segment["where"]


def test_a_key_that_cannot_sign_is_told_before_a_segment_runs(prove, d9m, keys, monkeypatch):
    """And one that is lost while they run does not lose their result."""
    prove()
    words = ("check", "proof.json", "--segments", "1", "--verdict", "verdict", "--sign")
    command = ("-o", "checked", "--", "python", "train.py")
    status, _, errors = d9m(*words, "key --private_key no.pem", *command)
    assert (status, Path("checked").exists()) == (2, False)
    assert "model_signing does not sign" in " ".join(errors.split())

    def lose(*_, **__):
        keys["private"].unlink()
        return CheckedSegment(0, 0, 16)

    known = keys["private"].read_bytes()
    monkeypatch.setattr("lightning_d9m.tools.cli.check.check_part", lose)
    status, out, errors = d9m(*words, f"key --private_key {keys['private']}", *command)
    keys["private"].write_bytes(known)
    assert (status, out.startswith("equal: 1 of 4")) == (2, True)
    assert "model_signing does not sign verdict" in " ".join(errors.split())


DIFFERS = "is not here as the proof has it"
MODEL = "step=60.ckpt does not hold the final weights"
# What is said of each lie; "records, checks and their hash made again" is found by its segment.
LIES = {
    "other code": "train.py is not here as it was",
    "module changed in place": "site-packages/steps.py is not here as it was",
    "package left out": "The package numpy is not in the proof",
    "model trained further": MODEL,
    "model trained further, its hash made again": MODEL,
    "mean of the model forged": MODEL,
    "tensor added to the model": MODEL,
    "records and checks made again": f"rank-0.jsonl {DIFFERS}",
    "proof of another run": "The ledger's field created",
    "ledger of another run": MODEL,
    "checkpoint left out": "step=15.ckpt is not in the proof",
    "everything excused": "rank-0.jsonl is not in the proof",
    "gap passed for a package": "The uncommitted part validation data is not in the proof",
    "gap left out": "The uncommitted part validation data is not in the proof",
    "two hashes of a file": f"rank-0.jsonl {DIFFERS}",
    "more of the run": f"The ledger's field accuracy {DIFFERS}",
}


def excuse(proof):
    """Leave out the files and facts of a proof, and say that it does not commit to them."""
    said, files = proof["predicate"], [own["name"] for own in proof["subject"]]
    said["uncommitted"].update(dict.fromkeys([*said["run"], *files], ""))
    proof["subject"], said["run"] = [], {}


def halve(proof):
    """Give a file two subjects, each with half of its hash."""
    name, digest = proof["subject"][0]["name"], proof["subject"][0]["digest"]["sha256"]
    halves = [{"name": name, "digest": {"sha256": half}} for half in (digest[:32], digest[32:])]
    proof["subject"][:1] = halves


def rename_gap(proof):
    said = proof["predicate"]
    said["packages"]["validation data"] = said["uncommitted"].pop("validation data")


def test_lies_are_told_before_anything_is_trained(prove, check, published, tmp_path):
    prove(wrong="label")
    other = shutil.copytree(tmp_path, tmp_path.parent / "other")
    Path("proof.json").unlink()
    prove()
    honest = shutil.copytree(tmp_path, tmp_path.parent / "honest")
    claim = lambda proof: proof["predicate"]["run"].update(accuracy=1.0)  # noqa: E731 - as the others
    lies = measured.list_lies(other)
    lies["everything excused"] = lambda folder: measured.edit_proof(folder, excuse)
    lies["gap passed for a package"] = lambda folder: measured.edit_proof(folder, rename_gap)
    lies["two hashes of a file"] = lambda folder: measured.edit_proof(folder, halve)
    lies["more of the run"] = lambda folder: measured.edit_proof(folder, claim)
    assert {*lies} - {*LIES} == {"records, checks and their hash made again"}
    for name, words in LIES.items():
        lies[name](tmp_path)
        status, found = check()
        assert (status, found["checked"]) == (1, []), name
        assert words in " ".join(found["problems"]), name
        shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    Path("train.py").unlink()
    assert "train.py is not here" in check()[1]["problems"][0]


def test_code_that_the_proof_does_not_have_is_refused_by_its_segment(d9m, stranger, check):
    """A liar has left a file out of the record of the code, or the stranger runs another one."""

    def shorten(records):
        for record in records:
            record.get("program", {}).pop("site-packages/steps.py", None)

    stranger()
    Path("other.py").write_text(Path("train.py").read_text())
    lines = Path(measured.LEDGER).read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[2] == kinds[-2] == "sources"  # a program that ends itself has one, too
    measured.edit_ledger(Path(measured.LEDGER), shorten)
    assert d9m("prove", "run")[0] == 0
    for name, said in (("train.py", "site-packages/steps.py"), ("other.py", "other.py")):
        status, found = check("--only", "0", program=name)
        assert status == 1
        (segment,) = found["checked"]
        assert segment["verdict"] == "refused"
        assert segment["reason"].startswith("The program has loaded other code than the run: ")
        assert said in segment["reason"]


def test_a_program_that_changes_the_file_of_its_proof_changes_no_verdict(prove, check, monkeypatch):
    """Nor is the verdict lost if the terminal has been closed."""
    prove()
    digest = hash_file(Path("proof.json"))

    def swap(*_, **__):
        Path("proof.json").write_text("{}")
        return CheckedSegment(0, 0, 16)

    def close(*_):
        raise RuntimeError

    monkeypatch.setattr("lightning_d9m.tools.cli.check.check_part", swap)
    monkeypatch.setattr("lightning_d9m.tools.cli.check.print_check", close)
    with pytest.raises(AssertionError, match="RuntimeError"):
        check("--segments", "1", "--choose", "7", "--verdict", "verdict")
    said = json.loads(Path("verdict").read_text())
    assert said["subject"] == [{"name": "proof.json", "digest": {"sha256": digest}}]


@pytest.mark.parametrize("name", [measured.LEDGER, "run/saved/step=45.ckpt"])
def test_a_program_that_changes_its_run_while_it_is_checked_is_rejected(
    prove, check, monkeypatch, name
):
    """Also one that puts the former content and time back before the check ends."""
    prove()
    known, status = Path(name).read_bytes(), Path(name).stat()

    def swap(*_, **__):
        Path(name).write_bytes(b"other")
        Path(name).write_bytes(known)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns))
        return CheckedSegment(0, 0, 16)

    monkeypatch.setattr("lightning_d9m.tools.cli.check.check_part", swap)
    status, found = check("--segments", "1", "--verdict", "verdict")
    assert status == 1
    assert found["problems"] == [
        f"{Path(name).resolve()} was written or replaced while the check ran."
    ]
    assert json.loads(Path("verdict").read_text())["predicate"]["properties"] == []


def test_a_proof_may_say_more_than_it_must(prove, check):
    prove()
    gap = {"training data": ""}
    measured.edit_proof(Path(), lambda proof: proof["predicate"]["uncommitted"].update(gap))
    assert check("--segments", "1")[0] == 0


def test_what_is_not_a_proof(d9m, stranger):
    stranger()

    def refuses(words, *arguments):
        status, _, errors = d9m(*arguments)
        assert status == 2
        assert words in " ".join(errors.split())

    def check(*options):
        return "check", "proof.json", *options, "--", "python", "train.py"

    Path("proof.json").write_text('{"x":' + "[" * 10_000)
    refuses("maximum recursion depth", *check())
    statement = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicate": {}}
    edit({"predicateType": "other", **statement})
    refuses("Invalid enum value 'other' - at `$.predicateType`", *check())
    statement["predicateType"] = "urn:lightning-d9m:training:1"
    edit(statement)
    refuses("missing required field `ledger`", *check())
    predicate = {"ledger": "no", "run": {}, "models": [], "uncommitted": {}, "packages": {}}
    proof = {**statement, "predicate": predicate}
    edit(proof)
    refuses("The ledger", *check())
    for name in ("_type", "predicateType"):
        edit({key: value for key, value in proof.items() if key != name})
        refuses(f"missing required field `{name}`", *check())
    refuses("exists already, so nothing can", "prove", "run")
    for option in ("--signer", "--choose"):
        refuses(f"{option} has no effect here", "check", "run", option, "1", "--", "python")
    edit({"predicateType": statement.pop("predicateType"), **statement}, "verdict.json")
    refuses("verdict.json exists", *check("--verdict", "verdict.json"))
    refuses("it is for chosen segments", *check("--verdict", "new.json", "--follow"))
    refuses("close each quote", *check("--signer", "key --public_key 'a"))
    refuses("close each quote", "prove", "run", "-o", "new.json", "--sign", "key 'a")
    assert not Path("new.json").exists()
    refuses("is not a verdict", "verify", "run/saved/step=60.ckpt", "--choose", "1")
    refuses("--verdict is not given", *check("--sign", "sigstore"))
    refuses("Name the proof", "verify", "verdict.json")
    refuses("Invalid enum value 'urn:light", "verify", "verdict.json", "proof.json")


def test_two_who_disagree_find_the_first_operation(prove, d9m, forking_python, monkeypatch):
    """The publisher's machine scales the loss from step 25 on; the stranger's does not."""
    prove(wrong="loss")
    command = ("--", forking_python, "train.py", "again")

    def compare_both(name, *words):
        ledgers = []
        for who, wrong in (("publisher", "loss"), ("stranger", "")):
            monkeypatch.setenv("WRONG", wrong)
            found = d9m(*words, "-o", f"{name}-{who}", *command)
            assert found[0] in (0, 1), found
            ledgers.append(next(Path(f"{name}-{who}").rglob("rank-0.jsonl")))
        return json.loads(d9m("compare", *ledgers, "--json")[1])["ranks"][0]["divergence"]

    with monkeypatch.context() as patch:
        patch.setenv("LIGHTNING_D9M_PROBES", "weight,loss")
        assert compare_both("segment", "check", "proof.json", "--only", "1")["step"] == 25
    first = compare_both("step", "goto", "25", "run", "--trace")
    assert (first["step"], first["kind"], first["name"]) == (25, "op", "(model)::aten.mul.Tensor")
