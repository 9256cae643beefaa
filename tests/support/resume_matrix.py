"""Kinds of programs that resumed without a word once, each by processes, workers and threads.

``python tests/support/resume_matrix.py FOLDER [KIND...]`` prints a row for each kind and a word for
each cell. `equal`: a resumed run ends with the bytes of a straight one; `refused`: an error names
the reason; `ended`: the check of the first steps ends it.
"""

import shutil
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from written_programs import name_outcome, on_ranks, train, write

# Lines of a program (see written_programs.py), which change its classes.
EPOCHS = """
Data.epoch = 0
Data.set_epoch = lambda self, epoch: setattr(self, "epoch", epoch)
Data.__getitem__ = lambda self, index: torch.linspace(0, 1, 3) * index + self.epoch
"""
OWN_LOADER = """
from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
from torch.utils.data.distributed import DistributedSampler
# Lightning cannot make it again to split the samples.
torch.utils.data.SequentialSampler = lambda data: DistributedSampler(data, PROCESSES, RANK)
"""
STREAM = """
class Data(torch.utils.data.IterableDataset):
    def __init__(self):
        self.generator, self.place = torch.Generator().manual_seed(1), 0
    def __len__(self):
        return SIZE
    def __iter__(self):
        self.place %= SIZE  # where it ended, or where a state says
        while self.place < SIZE:
            self.place += 1
            yield torch.rand(3, generator=self.generator)
    def state_dict(self):
        return {"place": self.place, "generator": self.generator.get_state()}
    def load_state_dict(self, state):
        self.place = state["place"]
        self.generator.set_state(state["generator"])
torch.utils.data.SequentialSampler = lambda data: None
"""
PRIORITIZED = """
class Prioritized(torch.utils.data.Sampler):
    def __init__(self, data):
        self.weights = torch.ones(SIZE)
    def __len__(self):
        return SIZE
    def __iter__(self):
        return (int(torch.multinomial(self.weights, 1)) for _ in range(SIZE))
def prioritize(self, trainer, *_):
    torch.here.sampler.weights[trainer.global_step % SIZE] += 9
torch.utils.data.SequentialSampler = Prioritized
Steering.on_before_zero_grad = prioritize
"""
STOPPING = """
class Steering(L.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__("val", patience=1, mode="max")
def validate(self, batch, index):
    self.log("val", self.net(batch).square().mean(), sync_dist=True)
Model.validation_step = validate
"""
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner  # whose state it does not save
    def step(self, closure=None):
        loss = closure()
        self.inner.step()
        return loss
Model.configure_optimizers = lambda self: Lookahead(torch.optim.Adam(self.parameters(), 0.01))
"""
GROUPS = """
def configure(self):
    named = dict(self.named_parameters())
    return torch.optim.Adam([{"params": [named[name] for name in {*named}]}], 0.01)
Model.configure_optimizers = configure
"""
LONGER = """
def extend(self):
    if self.current_epoch == 1:
        self.trainer.fit_loop.max_epochs = 4
Model.on_train_epoch_start = extend
"""
MANUAL = """
build = Model.__init__
def __init__(self):
    build(self)
    self.automatic_optimization = False
    self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=SCALES)
def step(self, batch, index):
    optimizer = self.optimizers()
    self.manual_backward(self.scaler.scale(self.net(batch).square().mean()))
    if SCALES or index == 2:
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
Model.__init__, Model.training_step = __init__, step
Model.on_save_checkpoint = lambda self, saved: saved.update(scaler=self.scaler.state_dict())
Model.on_load_checkpoint = lambda self, saved: self.scaler.load_state_dict(saved["scaler"])
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
def shard(self):
    self.net = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Linear(9, 1))
    fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
Model.configure_model = shard
"""
MEANS = """
def compute_mean(self, index):  # its last bits depend on the number of threads
    rows = torch.sin(torch.arange(300_000, dtype=torch.float32) * (index + 1))
    return torch.ones(3) * rows.mean() * 1e3
Data.__getitem__ = compute_mean
"""
HOOKED = """
def set_epoch(self):
    self.trainer.train_dataloader.dataset.epoch = self.current_epoch
Model.on_train_epoch_start = set_epoch
OPTIONS |= {"limit_val_batches": 0}  # a validation would read the same dataset
"""
STRATEGIES = {
    "FSDP2": partial(ModelParallelStrategy, save_distributed_checkpoint=False),
    "find_unused_parameters": "ddp_find_unused_parameters_true",
}
# State that a hook changes, by its kind and place there, or lines.
KINDS = {
    "plain": "",
    "set_epoch() of a dataset": EPOCHS,
    "epoch set in a hook": EPOCHS + HOOKED,
    "EarlyStopping, and the job again": STOPPING,
    "groups from sets": GROUPS,
    "a hook that saves draws": "Model.on_save_checkpoint = lambda self, _: torch.rand(3)",
    "a new dataset for each epoch": "",
    "class variable": ("list", "a helper class"),
    "partial": ("dict", "a partial"),
    "bound method": ("list", "a method"),
    "closure of LambdaLR": ("dict", "a schedule's closure"),
    "shared tensor": ("shared", "a module"),
    "Lookahead": LOOKAHEAD,
    "prioritized sampler": PRIORITIZED,
    "max_epochs in a hook": LONGER,
    "GradScaler": f"SCALES = True{MANUAL}",
    "mean of a large sample": MEANS,
    "StatefulDataLoader": OWN_LOADER,
    "StatefulDataLoader of a stream": OWN_LOADER + STREAM,
    "accumulation": "OPTIONS |= {'accumulate_grad_batches': 2}",
    "find_unused_parameters": "",
    "FSDP2": SHARDED,
    "FSDP2 that accumulates": f"SCALES = False{MANUAL}{SHARDED}",
}


def make_program(kind, processes, workers):
    """Return the source of a program."""
    given = KINDS[kind]
    state = given if isinstance(given, tuple) else ("nothing", "a module", "Steering, 'never'")
    facts = f"SIZE, PROCESSES = {12 * processes}, {processes}\nData.__len__ = lambda self: SIZE\n"
    facts += "RANK = int(os.environ.get('RANK', 0))\n"
    loading = "new data" if kind.startswith("a new") else ""
    if workers:
        loading = f"{loading} by workers" if loading else "workers"
    lines = f"import os\n{facts}{'' if isinstance(given, tuple) else given}"
    return write(*state, loading=loading, lines=lines)


def judge(kind, folder, processes, workers, threads):
    """Return a word for a resume within an epoch, and for one at its end; with the first error."""
    said, straight = [], None
    strategy = STRATEGIES.get(kind.partition(" ")[0], "ddp") if processes > 1 else "auto"
    source = make_program(kind, processes, workers)
    within = 2 if kind == "FSDP2 that accumulates" else 5  # steps, of which it has one an epoch
    for place in (None, within, 3):
        words = {"strategy": strategy() if callable(strategy) else strategy, "threads": threads}
        found = on_ranks(partial(train, source, folder, place, **words), processes)
        straight = found if straight is None else straight
        said += [name_outcome(straight, found)] if place or isinstance(found, str) else []
        if said and said[-1] in ("failed", "refused", "ended"):
            sys.stderr.write(f"{kind} {processes}/{workers}/{threads}: {found[-1500:]}\n")
    shutil.rmtree(folder)
    return said


def main():
    """Print the table."""
    torch.set_num_threads(1)
    folder, *chosen = sys.argv[1:]
    counts = Counter()
    for kind in chosen or KINDS:
        cells = []
        for processes, workers, threads in product(
            (1, 2 if kind.startswith("FSDP2") else 3), (0, 2), (1, 2)
        ):
            if (kind.startswith("FSDP2") and processes == 1) or (processes > 1 and threads > 1):
                continue
            words = judge(kind, Path(folder), processes, workers, threads)
            counts.update(words)
            cells.append(f"{processes}/{workers}/{threads} {', '.join(words)}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    print(dict(counts))  # noqa: T201


if __name__ == "__main__":
    main()
