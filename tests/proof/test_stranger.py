"""A stranger accepts the proof of an honest training, and each lie is rejected with its place.

Signatures are verified by the command of another package, too.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from ledger_runs import write_lines

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.tools.proof.training import hash_package

PROGRAM = Path(__file__).parents[1] / "support/checked_training.py"


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
    known = {}

    def hash_once(package):
        if package.name not in known:
            known[package.name] = hash_package(package)
        return known[package.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_d9m.tools.proof.training.hash_package", hash_once)
        found = cache(packages_distributions)
        patch.setattr("lightning_d9m.tools.proof.training.packages_distributions", found)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory, forking_python):
    """Return a function that returns a folder with program and run, in which one thing is wrong."""
    made = {}

    def train(wrong=""):
        folder = made.get(wrong)
        if folder is None:
            # As deep as the folder of a stranger: a file outside of both has one path from each.
            folder = made[wrong] = tmp_path_factory.mktemp("published")
            shutil.copy(PROGRAM, folder / "train.py")
            given = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LIGHTNING_D9M_PROVABLE": "1"}
            words = [forking_python, "train.py", "run"]
            variables = {**os.environ, **given, "WRONG": wrong}
            subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True)
        return folder

    return train


@pytest.fixture
def stranger(published, tmp_path, monkeypatch):
    """Return a function that copies what is published to the working folder of a stranger."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
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

    def run(*options):
        command = ("--json", "--", forking_python, "train.py", "again")
        status, out, errors = d9m("check", "proof.json", *options, *command)
        assert out, errors
        return status, json.loads(out)

    return run


def edit(proof, path="proof.json"):
    Path(path).write_text(json.dumps(proof))


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

    assert verify("--signer", public, "--choose", "7")[0] == 0
    verdict = json.loads(Path("verdict.json").read_text())
    equal = "LIGHTNING_D9M_SEGMENTS_EQUAL_1_OF_4_CHOSEN_BY_"
    assert verdict["predicate"]["properties"] == [f"{equal}7"]
    # A replayed verdict: one of another check, on another proof, edited, or without its signature.
    status, said = verify("--choose", "8")
    assert status == 1
    assert f"not chosen with 8: {equal}7" in said
    verdict["predicate"]["properties"] = [f"{equal}8"]
    edit(verdict, "verdict.json")
    status, said = verify("--signer", public, "--choose", "8")
    assert status == 1
    assert "has no valid signature" in " ".join(said.split())
    verdict["predicate"]["properties"] = []
    edit(verdict, "verdict.json")
    assert "does not say that the run is equal" in verify()[1]
    edit(json.loads(Path("proof.json").read_text()))  # the same statement in other bytes
    assert "on another file than proof.json" in verify("--choose", "8")[1]
    Path("verdict.json.sig").unlink()
    assert "No such file" in verify("--signer", public)[1]


def test_a_proof_of_a_training_with_another_label_is_rejected_by_its_segment(prove, check):
    prove(wrong="label")
    status, found = check("--only", "0")
    assert status == 1
    (segment,) = found["checked"]
    assert (segment["verdict"], segment["equal_until"]) == ("persistent", 0)
    assert "step 16" in segment["where"]


def add_a_sample(text):
    assert "20 * BATCH + " in text
    return text.replace("20 * BATCH + ", "20 * BATCH + 1 + ")


def train_further(path):
    import torch

    checkpoint = torch.load(path, weights_only=True)
    next(iter(checkpoint["state_dict"].values())).view(-1)[0] += 1e-3
    torch.save(checkpoint, path)


def test_lies_are_told_before_anything_is_trained(prove, check, published):
    proof = prove()

    def reject(words, undo):
        status, found = check()
        undo()
        assert status == 1
        assert not found["checked"]
        assert words in " ".join(found["problems"])

    program, ledger = Path("train.py"), Path("run/fit-000/rank-0.jsonl")
    honest, records = program.read_text(), ledger.read_bytes()
    program.write_text(add_a_sample(honest))  # other code with the same commit
    reject("train.py is not here as it was", lambda: program.write_text(honest))
    program.unlink()
    reject("train.py is not here as it was", lambda: program.write_text(honest))
    edited = records.replace(b'"step":60', b'"step":61').splitlines()
    bodies = [json.loads(line) for line in edited]
    write_lines(ledger, [{k: own[k] for k in own if k != "check"} for own in bodies])
    reject("rank-0.jsonl is not here as the proof has it", lambda: ledger.write_bytes(records))

    model = Path("run/saved/step=60.ckpt")
    weights = model.read_bytes()
    train_further(model)
    reject("step=60.ckpt does not hold the final weights", lambda: model.write_bytes(weights))
    # Whoever makes the statement again for changed files has to make it about another run.
    other = published("label") / "run/fit-000/rank-0.jsonl"
    ledger.write_bytes(other.read_bytes())
    subject = next(own for own in proof["subject"] if own["name"].endswith("jsonl"))
    was = dict(subject["digest"])
    subject["digest"]["sha256"] = hash_file(ledger)
    edit(proof)
    subject["digest"] = was

    def restore():
        ledger.write_bytes(records)
        edit(proof)

    reject("does not hold the final weights", restore)


def test_a_package_that_was_changed_in_place_is_named(prove, check):
    proof = prove()
    proof["predicate"]["packages"]["numpy"] = "0" * 64
    edit(proof)
    status, found = check()
    assert status == 1
    packages = proof["predicate"]["run"]["sources"]["packages"]
    assert "The package numpy is not here as the proof has it" in found["problems"][0]
    assert not found["checked"]
    packages["numpy"] = "0.1"
    proof["predicate"]["run"]["accuracy"] = 1.0  # nothing of it follows from the ledger
    edit(proof)
    said = " ".join(check()[1]["problems"])
    for name in ("accuracy", "sources"):
        assert f"The ledger's field {name} is not here as the proof has it." in said
    del proof["predicate"]["packages"]["numpy"]
    edit(proof)
    assert "The package numpy is not in the proof" in " ".join(check()[1]["problems"])


def test_a_proof_that_leaves_something_out_is_rejected(prove, check):
    proof = prove()
    for name, kept, words in (
        (
            "subject",
            [own for own in proof["subject"] if "15" not in own["name"]],
            "not in the proof",
        ),
        ("subject", proof["subject"], ""),
    ):
        edit({**proof, name: kept})
        problems = check("--segments", "1", *(() if words else ("--choose", "1")))[1]["problems"]
        assert words in " ".join(problems)
        assert bool(words) == bool(problems)
    said = {**proof["predicate"]["uncommitted"], "training data": ""}
    edit({**proof, "predicate": {**proof["predicate"], "uncommitted": said}})
    assert check("--segments", "1")[0] == 0  # it may say more than it must


def test_what_is_not_a_proof(d9m, stranger):
    stranger()

    def refuses(words, *arguments):
        status, _, errors = d9m(*arguments)
        assert status == 2
        assert words in " ".join(errors.split())

    def check(*options):
        return "check", "proof.json", *options, "--", "python", "train.py"

    Path("proof.json").write_text('{"x":' + "[" * 10_000)
    refuses("nested too deeply", *check())
    statement = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicate": {}}
    edit({**statement, "predicateType": "other"})
    refuses("Invalid value 'other' - at `$.predicateType`", *check())
    statement["predicateType"] = "urn:lightning-d9m:training:1"
    edit(statement)
    refuses("missing required field `ledger`", *check())
    predicate = {"ledger": "no", "run": {}, "models": [], "uncommitted": {}, "packages": {}}
    edit({**statement, "predicate": predicate})
    refuses("The ledger", *check())
    refuses("exists already, so nothing can", "prove", "run")
    for option in ("--signer", "--choose"):
        refuses(f"{option} has no effect here", "check", "run", option, "1", "--", "python")
    edit({**statement, "predicateType": "other"}, "verdict.json")
    refuses("verdict.json exists", *check("--verdict", "verdict.json"))
    refuses("it is for a check of chosen", *check("--verdict", "new.json", "--follow"))
    refuses("close each quote", *check("--signer", "key --public_key 'a"))
    refuses("close each quote", "prove", "run", "-o", "new.json", "--sign", "key 'a")
    assert not Path("new.json").exists()
    refuses("is not a verdict", "verify", "run/saved/step=60.ckpt", "--choose", "1")
    refuses("--verdict is not given", *check("--sign", "sigstore"))
    refuses("Name the proof", "verify", "verdict.json")
    refuses("Invalid value 'other'", "verify", "verdict.json", "proof.json")


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
