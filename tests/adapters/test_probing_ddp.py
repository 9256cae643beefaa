"""Two processes with DDP on Gloo: gradients before and after the ranks exchange them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_d9m.evidence.ledger import read_ledger

SCRIPT = Path(__file__).parents[1] / "ddp_probing.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train in two processes once for all tests."""
    folder = tmp_path_factory.mktemp("ddp")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "d9m",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return folder


def first_batch(folder, rank):
    """Return digest by place of a rank's first batch."""
    file = folder / "probed" / "fit-000" / f"rank-{rank}.jsonl"
    layouts, places = {}, {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "layout":
            layouts[record["id"]] = [tuple(place) for place in record["places"]]
        if record["kind"] == "probes" and (record["epoch"], record["batch"]) == (0, 0):
            text = record["digests"]
            digests = [text[i : i + 32] for i in range(0, len(text), 32)]
            places |= dict(zip(layouts[record["layout"]], digests, strict=True))
    return places


def test_probes_and_replays_change_no_bit(folder):
    plain, probed = (read_ledger(folder / name / "fit-000") for name in ("plain", "probed"))
    for rank in (0, 1):
        assert plain.outcome(rank).final == probed.outcome(rank).final


def test_local_gradients_differ_and_reduced_ones_do_not(folder):
    ranks = [first_batch(folder, rank) for rank in (0, 1)]
    kinds = ("local_gradient", "gradient")
    local, reduced = ([own[kind, "layers.0.weight", 0] for own in ranks] for kind in kinds)
    assert local[0] != local[1]
    assert reduced[0] == reduced[1]
    assert reduced[0] not in local


def test_a_fault_on_one_rank_stops_both(folder):
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    assert (found[1]["step"], found[1]["group"], found[1]["names"]) == (2, "output", ["layers.0"])
    assert "Rank 1 failed" in found[0]["message"]
