"""GraphSAGE on a citation graph, trained 100 times with determinism and 100 times without.

The experiment is that of Shanmugavelu et al. 2024 (arXiv 2408.05148, section V), with every seed
fixed, so that only rounding differs; the paper draws new initial weights and new dropout in every
run. The graph is synthetic and has the counts of Cora (2,708 papers, 10,556 links counted both
ways, 7 classes, 140 papers for training): a paper cites by preferential attachment, in four of five
cases a paper of the same class. On a CPU messages are added at their target with
``index_put_(accumulate=True)``, which two threads do in varying order; on other devices with
``index_add``, as in the paper.

    python benchmarks/ops/graphsage.py --output FOLDER [--device cuda]

A later call continues an interrupted one.
"""

import argparse
import json
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lightning_d9m import deterministic
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.tools.comparison.numeric_difference import measure_variation

PAPERS, LINKS, CLASSES, FEATURES, HIDDEN = 2708, 5278, 7, 128, 64
TRAINED, TESTED = 140, 1000
ARMS = ("nondeterministic", "deterministic")


class Citations:
    """A citation graph: features and class of each paper, and links in both directions."""

    def __init__(self, device: str) -> None:
        draws = np.random.default_rng(0)
        classes = draws.integers(CLASSES, size=PAPERS)
        words = draws.normal(size=(CLASSES, FEATURES))
        features = words[classes] * 0.25 + draws.normal(size=(PAPERS, FEATURES))
        links: list[tuple[int, int]] = []
        # Each citation adds the cited paper to its class's urn again (preferential attachment).
        urns = [[int(paper) for paper in np.flatnonzero(classes == k)] for k in range(CLASSES)]
        while len(links) < LINKS:
            citing = int(draws.integers(PAPERS))
            own = draws.random() < 0.8
            urn = urns[classes[citing] if own else int(draws.integers(CLASSES))]
            cited = urn[int(draws.integers(len(urn)))]
            if cited != citing:
                links.append((citing, cited))
                urns[classes[cited]].append(cited)
        ends = torch.tensor(links)
        both = torch.cat([ends, ends.flip(1)])
        self.source, self.target = (both[:, end].contiguous().to(device) for end in (0, 1))
        self.features = torch.tensor(features, dtype=torch.float32, device=device)
        self.classes = torch.tensor(classes, device=device)
        order = torch.tensor(draws.permutation(PAPERS), device=device)
        self.trained, self.tested = order[:TRAINED], order[-TESTED:]
        self.degrees = torch.bincount(both[:, 1], minlength=PAPERS).clamp(min=1).unsqueeze(1)
        self.degrees = self.degrees.to(device)


class Layer(nn.Module):
    """A layer of a paper's features and its neighbors' mean, normalized as in the publication."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs, bias=False)
        self.received = nn.Linear(inputs, outputs, bias=False)

    def forward(self, papers: Tensor, graph: Citations) -> Tensor:
        """Map (papers, inputs) to (papers, outputs)."""
        sums = torch.zeros_like(papers)
        if papers.device.type == "cpu":
            sums = sums.index_put((graph.target,), papers[graph.source], accumulate=True)
        else:
            sums = sums.index_add(0, graph.target, papers[graph.source])
        return nnf.normalize(self.own(papers) + self.received(sums / graph.degrees), dim=-1)


class GraphSage(nn.Module):
    """A network of two GraphSAGE layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(FEATURES, HIDDEN), Layer(HIDDEN, CLASSES)

    def forward(self, graph: Citations) -> Tensor:
        """Return the log-probabilities of the classes, (papers, classes)."""
        hidden = nnf.dropout(self.first(graph.features, graph).relu(), training=self.training)
        return self.second(hidden, graph).log_softmax(1)


def train(graph: Citations, arm: str, epochs: int) -> tuple[dict, list[list[Tensor]]]:
    """Train once; return the row of the training and its weights by epoch."""
    chosen = deterministic(seed=1) if arm == "deterministic" else nullcontext()
    with chosen:
        torch.manual_seed(1)  # the same draws in every training of both conditions
        model = GraphSage().to(graph.features.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        weights, losses = [], []
        begin = time.perf_counter()
        for _ in range(epochs):
            optimizer.zero_grad()
            loss = nnf.nll_loss(model(graph)[graph.trained], graph.classes[graph.trained])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        weights[-1][0].sum().item()  # waits for the device
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            guessed = model.eval()(graph)[graph.tested].argmax(1)
        accuracy = float((guessed == graph.classes[graph.tested]).float().mean())
    row = {
        "arm": arm,
        "seconds": seconds,
        "loss": losses[-1].hex(),
        "accuracy": accuracy,
        "digests": [digest_value(epoch) for epoch in weights],
    }
    return row, weights


def run(output: Path, device: str, trainings: int, epochs: int, limit: float) -> list[dict]:
    """Append a row for each training to a file until all exist or time is up."""
    path = output / f"graphsage-{device}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    graph, begin = Citations(device), time.monotonic()
    _, reference = train(graph, "deterministic", epochs)
    with path.open("a") as file:
        for number in range(trainings):
            for arm in ARMS:
                if sum(row["arm"] == arm for row in rows) > number:
                    continue
                if time.monotonic() - begin > limit:
                    return rows
                row, weights = train(graph, arm, epochs)
                found = [measure_variation(*pair) for pair in zip(reference, weights, strict=True)]
                row |= {
                    key: [getattr(one, key) for one in found] for key in ("vermv", "vc", "ulps")
                }
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    return rows


def summarize(rows: list[dict], device: str, epochs: int) -> dict:
    """Return the figures of both conditions."""
    arms = {}
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        losses = [float.fromhex(row["loss"]) for row in mine]
        arms[arm] = {
            "trainings": len(mine),
            "distinct": [len({row["digests"][e] for row in mine}) for e in range(epochs)],
            "distinct_losses": len({row["loss"] for row in mine}),
            "loss": [min(losses), max(losses)],
            "accuracy": sorted({row["accuracy"] for row in mine}),
            "seconds": statistics.median(row["seconds"] for row in mine),
            "quartiles": statistics.quantiles([row["seconds"] for row in mine], n=4)[::2],
            **{
                key: [statistics.fmean(row[key][e] for row in mine) for e in range(epochs)]
                for key in ("vermv", "vc")
            },
            "ulps": [max(row["ulps"][e] for row in mine) for e in range(epochs)],
        }
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "graph": {"papers": PAPERS, "links": 2 * LINKS, "features": FEATURES, "hidden": HIDDEN},
        "epochs": epochs,
        "arms": arms,
        "ratio": arms[ARMS[1]]["seconds"] / arms[ARMS[0]]["seconds"],
    }


def main() -> None:
    """Run the missing trainings, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trainings", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; a later call continues")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    output, device, epochs = arguments.output, arguments.device, arguments.epochs
    rows = run(output, device, arguments.trainings, epochs, arguments.limit)
    result = summarize(rows, device, epochs)
    (output / f"graphsage-{device}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
