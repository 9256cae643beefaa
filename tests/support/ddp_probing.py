"""One rank of trainings with probes under DDP; see lightning/test_probes_ddp.py."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from ddp_training import RANK, error_of, fit
from trainings import make_model


class FlipOnRank1:
    """Flips a bit of an output once, on rank 1: in the first run of the third batch."""

    def __init__(self):
        self.left = 2 + 5  # two batches of validation before, two runs of a batch

    def __call__(self, module, args, output):
        self.left -= 1
        if RANK == 1 and self.left == 0:
            flipped = output.detach().clone()
            flipped.view(torch.int32)[0, 0] ^= 1 << 12
            return output + (flipped - output.detach())
        return None


def main():
    """Train several times, and write the error of the last."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    fit(folder, "plain")
    fit(folder, "probed", probes="all", replay_every=2)
    faulty = make_model()
    faulty.layers[0].register_forward_hook(FlipOnRank1())
    found = error_of(folder, "faulty", faulty, replay_every=1, probes="loss", probe_ranks=1)
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    assert os.environ["WORLD_SIZE"] == "2"


if __name__ == "__main__":
    main()
