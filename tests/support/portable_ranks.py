"""One rank of a training with portable bits and four logical ranks; see test_switches.py."""

import sys
from pathlib import Path

import lightning_d9m

lightning_d9m.enable(portable=True)

import lightning as L  # noqa: E402 - the mode is on before anything is drawn
from logical_trainings import PROCESSES, Classifier, make_data, make_net  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from trainings import QUIET  # noqa: E402


def main():
    """Train the convolutional network for an epoch."""
    L.seed_everything(1)
    callback = lightning_d9m.DeterminismCallback(
        seed=5, portable=True, ledger_dir=Path(sys.argv[1])
    )
    trainer = L.Trainer(
        max_epochs=1,
        strategy=lightning_d9m.DDPDeterministicStrategy(logical_ranks=4),
        devices=PROCESSES,
        callbacks=[callback],
        **QUIET,
    )
    trainer.fit(Classifier(make_net("cnn")), DataLoader(make_data(28), batch_size=3))


if __name__ == "__main__":
    main()
