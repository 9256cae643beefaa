"""One rank of a training with portable bits and four logical ranks; see test_switches.py."""

import sys
from pathlib import Path

import lightning_d9m

lightning_d9m.enable(portable=True)

from logical_trainings import fit  # noqa: E402 - the mode is on before anything is drawn

if __name__ == "__main__":
    fit(Path(sys.argv[1]), "cnn", 4, max_epochs=1)
