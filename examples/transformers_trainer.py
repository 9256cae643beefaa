"""Train a tiny transformer with Hugging Face's Trainer, bit-exactly, with a ledger.

The model is made from a configuration, and the data are made here: nothing is downloaded.

Run it once:                     python examples/transformers_trainer.py
Prove that it is bit-exact:      d9m repeat -n 2 -- python examples/transformers_trainer.py
Stop it and go on:               python examples/transformers_trainer.py --stop-after 1
                                 python examples/transformers_trainer.py --resume
On two processes:                torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.utils.logging import disable_progress_bar

import lightning_d9m

EPOCHS = 3
MIDDLE = 3.0


class StopAfter(TrainerCallback):
    """Ends the training early, as a time limit of a cluster does."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop after so many epochs."""
        if self.epochs and state.epoch >= self.epochs:
            control.should_training_stop = True


def make_samples(count: int = 160) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 12 tokens, labeled by whether their mean is above 3."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 6, (count, 12), generator=generator)
    labels = (tokens.float().mean(1) > MIDDLE).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def train(
    folder: Path,
    *callbacks: TrainerCallback,
    resume: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> lightning_d9m.TransformersCallback:
    """Train, and return the callback, which names the ledger.

    Args:
        folder: The folder of ledgers and checkpoints.
        *callbacks: Further callbacks.
        resume: Whether to continue from the last checkpoint.
        settings: Settings of our callback.
        **arguments: Further arguments of the Trainer.
    """
    with lightning_d9m.deterministic(seed=42):
        config = BertConfig(
            vocab_size=6,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
        )
        determinism = lightning_d9m.TransformersCallback(folder, **settings)
        trainer = Trainer(
            BertForSequenceClassification(config),
            TrainingArguments(
                str(folder / "checkpoints"),
                **{"num_train_epochs": EPOCHS, "save_strategy": "epoch", **arguments},
                per_device_train_batch_size=16,
                learning_rate=1e-2,
                logging_steps=5,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=make_samples(),
            callbacks=[determinism, *callbacks],
        )
        trainer.train(resume_from_checkpoint=resume)
    return determinism


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stop-after", type=int, default=0, help="end after so many epochs")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    disable_progress_bar()
    finished = train(arguments.folder, StopAfter(arguments.stop_after), resume=arguments.resume)
    print(f"ledger: {finished.ledger}, weights: {finished.digest}")
