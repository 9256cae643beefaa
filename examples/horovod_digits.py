"""Train the digits network in several processes with Horovod, bit-exactly.

Build Horovod for your torch once:  d9m install-horovod
Two processes on this machine:      horovodrun -np 2 python examples/horovod_digits.py
Two hosts with two processes each:  horovodrun -np 4 -H host1:2,host2:2 python examples/horovod_digits.py
Prove that it is bit-exact:         d9m repeat -n 2 -- horovodrun -np 2 python examples/horovod_digits.py
"""  # noqa: E501 - commands stay on one line

import argparse

import lightning as L
from digits import Digits, DigitsNet

from lightning_d9m import DeterminismCallback, HorovodDeterministicStrategy


def main() -> None:
    """Train, and print rank 0's validation accuracy."""
    parser = argparse.ArgumentParser(description="Train on digits in several processes.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process")
    given = parser.parse_args()
    trainer = L.Trainer(
        strategy=HorovodDeterministicStrategy(),
        callbacks=[DeterminismCallback()],
        max_epochs=given.epochs,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    # The weights are drawn here: seeded, they are the same in every run and on every rank.
    L.seed_everything(42, verbose=False)
    model = DigitsNet()
    trainer.fit(model, Digits(given.batch_size))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_accuracy"])
        print(f"{trainer.world_size} processes, {trainer.global_step} steps: {accuracy:.4f}")


if __name__ == "__main__":
    main()
