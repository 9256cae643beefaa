"""Classify handwritten digits as nodes of a graph, an op that is nondeterministic even on a CPU.

Each digit is connected to the digits that are most similar; messages along the edges are pooled at
their target with ``index_put_(accumulate=True)``. Two threads that add to one target meet in
a different order each time, so the sums, and all weights after them, differ from run to run.

Without determinism:             python examples/graph.py --plain      (run it twice)
With it:                         python examples/graph.py
Prove that it is bit-exact:      d9m repeat -n 3 -- python examples/graph.py
"""

import argparse

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9m import DeterminismCallback, digest_value

NEIGHBORS = 16


def find_neighbors(images: np.ndarray) -> np.ndarray:
    """Return which images are nearest to each, (images, neighbors).

    Gray values are whole numbers, so the distances are exact; of equal ones the first images count.
    scikit-learn's ``kneighbors_graph`` chooses others with another number of threads.
    """
    squares = (images**2).sum(1)
    distances = squares[:, None] + squares - 2 * images @ images.T
    np.fill_diagonal(distances, np.inf)
    return distances.argsort(1, kind="stable")[:, :NEIGHBORS]


class MeanPooling(nn.Module):
    """One GraphSAGE layer: a node's features and the mean of those that its neighbors send."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.received = nn.Linear(inputs, outputs)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Map (nodes, inputs) to (nodes, outputs); edges lead from source to target, (edges,)."""
        sums = torch.zeros_like(nodes).index_put_((target,), nodes[source], accumulate=True)
        counts = torch.bincount(target, minlength=len(nodes)).clamp(min=1).unsqueeze(1)
        return self.own(nodes) + self.received(sums / counts)


class DigitsGraph(L.LightningModule):
    """GraphSAGE with two layers on a graph of 1,797 digits, trained on 1,437 of them."""

    def __init__(self) -> None:
        super().__init__()
        digits = load_digits()
        neighbors = torch.from_numpy(find_neighbors(digits.data))
        shuffled = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
        self.register_buffer("nodes", torch.tensor(digits.data, dtype=torch.float32) / 16)
        self.register_buffer("classes", torch.tensor(digits.target))
        self.register_buffer("source", torch.arange(len(neighbors)).repeat_interleave(NEIGHBORS))
        self.register_buffer("target", neighbors.flatten())
        self.register_buffer("training_nodes", shuffled[:1437])
        self.register_buffer("held_out_nodes", shuffled[1437:])
        self.first = MeanPooling(64, 64)
        self.second = MeanPooling(64, 10)

    def forward(self) -> Tensor:
        """Return the logits of all nodes, (nodes, 10)."""
        hidden = torch.relu(self.first(self.nodes, self.source, self.target))
        return self.second(hidden, self.source, self.target)

    def training_step(self, *_: object) -> Tensor:
        """Return the cross-entropy over the training nodes."""
        chosen = self.training_nodes
        return nn.functional.cross_entropy(self()[chosen], self.classes[chosen])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[int]:
        """Ten steps an epoch; the graph itself is in the model."""
        return DataLoader(range(10), batch_size=1)  # type: ignore[arg-type]

    @torch.no_grad()
    def held_out_accuracy(self) -> float:
        """Return the share of held-out nodes that are classified rightly."""
        chosen = self.held_out_nodes
        return float((self()[chosen].argmax(1) == self.classes[chosen]).float().mean())


def train(
    *, seed: int = 42, epochs: int = 3, plain: bool = False, **settings: object
) -> DigitsGraph:
    """Train once; ``plain`` leaves the callback out, as a user without it would."""
    L.seed_everything(seed, verbose=False)
    model = DigitsGraph()
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[] if plain else [DeterminismCallback(**settings)],  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    return model


def main() -> None:
    """Train, and print what the weights are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without the callback")
    arguments = parser.parse_args()
    model = train(seed=arguments.seed, epochs=arguments.epochs, plain=arguments.plain)
    print(f"digest of the weights: {digest_value(dict(model.named_parameters()))}")
    print(f"held-out accuracy:     {model.held_out_accuracy():.4f}")


if __name__ == "__main__":
    main()
