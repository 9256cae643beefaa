"""Train the digits network with portable bits, by C and by Triton's kernels as executed PTX.

    python benchmarks/portable_cuda.py [--steps 3] [--batch 4]

No GPU is needed, and none is shown: NumPy executes the PTX that Triton compiles for sm_90, while
torch's CPU operations serve for what is one rounding or a move. Both digests must be equal.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from lightning_d9m import portable
from lightning_d9m.engine.hashing.digest import digest_many

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]
from digits import DigitsNet  # noqa: E402 - its folder is on the path from the lines above
from executed import executed  # noqa: E402 - as above


def train(steps: int, batch: int) -> str:
    """Return the digest of the weights after some steps of AdamW."""
    torch.manual_seed(0)
    with portable():
        layers = DigitsNet().layers
        optimizer = torch.optim.AdamW(layers.parameters(), lr=2e-3)
        images, classes = torch.rand(batch, 1, 8, 8), torch.randint(0, 10, (batch,))
        for step in range(steps):
            begin = time.time()
            loss = nn.functional.cross_entropy(layers(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item().hex(), f"{time.time() - begin:.1f} s", flush=True)
    return " ".join(one[:8] for one in digest_many([*layers.parameters(), *layers.buffers()]))


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    expected = train(given.steps, given.batch)
    with executed() as launches:
        found = train(given.steps, given.batch)
    names = Counter(one.kernel.__name__ for one in launches)
    print(dict(names), found, "equal" if found == expected else f"not {expected}")
    sys.exit(found != expected)


if __name__ == "__main__":
    main()
