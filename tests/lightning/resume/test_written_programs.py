"""Programs that Hypothesis writes: state of any kind, at any place, that any hook changes.

A resumed run is equal to a straight one, or refused. It never differs without a word.
"""

import shutil
import sys
from types import ModuleType

import lightning.pytorch as L
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainings import QUIET

from lightning_d9m import DeterminismCallback, InexactResumeError

# With `--hypothesis-profile=search` many. (Hypothesis prints blobs wherever CI is set.)
EXAMPLES = 6 if settings().derandomize else 3000

PROGRAM = """
import array, collections, contextvars, ctypes, dataclasses, enum, functools, io, itertools, mmap
import multiprocessing, queue, random, tempfile, types
import lightning.pytorch as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

KEPT, SCHEDULE = None, None
VAR = contextvars.ContextVar("VAR")
Row = collections.namedtuple("Row", "number tensor")

class Color(enum.Enum):
    RED = 1
    BLUE = 2

class Helper:
    kept = None

class Holder:
    def __init__(self, kept):
        self.kept = kept
    def get(self):
        return self.kept

class Slotted:
    __slots__ = ("kept",)

class Own(io.StringIO):
    pass

class Numbers(list):
    pass

@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int
    tensor: object

@dataclasses.dataclass
class Record:
    kept: object

def identity(kept):
    return kept

def scale(step, kept):
    return 1.0

def count_up():
    number = 0
    while True:
        number += 1
        yield number

def keep(kept):
    return lambda: kept

def open_file(mode):
    file = tempfile.TemporaryFile(mode)
    lines = "".join("x" * (number %% 7) + chr(10) for number in range(200))
    file.write(lines if "b" not in mode else lines.encode())
    file.seek(0)
    return file

class Data(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.linspace(0, 1, 3) * index

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def validation_step(self, batch, index):
        self.net(batch)
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        factor = functools.partial(scale, kept=SCHEDULE)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factor)]

class Steering(L.Callback):
    def %(hook)s(self, trainer, *_):
        kept = %(get)s
        %(change)s
        with torch.no_grad():
            model.net.bias.add_(1e-2 * float(number))

model, steering, data = Model(), Steering(), Data()

def put(kept):
    %(put)s

put(%(make)s)
"""
KINDS = {
    "list": ("[1]", "kept.append(len(kept)); number = sum(kept)"),
    "subclass": ("Numbers([1])", "kept.append(len(kept)); number = sum(kept)"),
    "dict": ("{'n': 1}", "kept['n'] += 1; number = kept['n']"),
    "ordered": ("collections.OrderedDict(n=1)", "kept['n'] += 1; number = kept['n']"),
    "counter": ("collections.Counter()", "kept['n'] += 1; number = kept['n']"),
    "user dict": ("collections.UserDict(n=1)", "kept['n'] += 1; number = kept['n']"),
    "chain": ("collections.ChainMap({'n': 1})", "kept['n'] += 1; number = kept['n']"),
    "set": ("{0}", "kept.add(len(kept)); number = len(kept)"),
    "deque": ("collections.deque([1], 3)", "kept.append(sum(kept)); number = sum(kept) % 9"),
    "tensor": ("torch.zeros(2)", "kept.data.add_(1); number = kept[0]"),
    "shared": ("torch.zeros(2).share_memory_()", "kept.add_(1); number = kept[0]"),
    "view": ("torch.zeros(2, 2)[0]", "kept.add_(1); number = kept[0]"),
    "array": ("np.zeros(2)", "kept += 1; number = kept[0]"),
    "python": ("random.Random(1)", "number = kept.random()"),
    "numpy": ("np.random.default_rng(1)", "number = kept.random()"),
    "torch": ("torch.Generator().manual_seed(1)", "number = torch.rand(1, generator=kept)"),
    "object": ("Holder(0)", "kept.kept += 1; number = kept.kept"),
    "record": ("Record(0)", "kept.kept += 1; number = kept.kept"),
    "namespace": ("types.SimpleNamespace(n=0)", "kept.n += 1; number = kept.n"),
    "method": ("Holder([0]).get", "kept().append(1); number = len(kept())"),
    "partial": ("functools.partial(identity, [0])", "kept().append(1); number = len(kept())"),
    "closure": ("keep([0])", "kept().append(1); number = len(kept())"),
    "rows": ("[]", "kept.append(Row(1, torch.ones(1))); number = sum(own[0] for own in kept)"),
    "frozen": ("[]", "kept.append(Frozen(1, None)); number = sum(own.number for own in kept)"),
    "enums": ("[Color.RED]", "kept.insert(0, Color.BLUE); number = len(kept) + kept[0].value"),
    "objects": ("[]", "kept.append(Holder(1)); number = len(kept)"),
    "set of objects": ("{Holder(0)}", "kept.add(Holder(1)); number = len(kept)"),
    "changed in a set": ("{Holder([0])}", "(own,) = kept; own.kept += [1]; number = len(own.kept)"),
    "text": ("io.StringIO('x' * 300)", "kept.read(2); number = kept.tell()"),
    "own text": ("Own('x' * 300)", "kept.read(2); number = kept.tell()"),
    "bytes": ("io.BytesIO(bytes(300))", "kept.read(2); number = kept.tell()"),
    "file": ("open_file('w+')", "number = len(kept.readline())"),
    "raw file": ("open_file('w+b')", "number = len(kept.readline())"),
    "map": ("mmap.mmap(-1, 9)", "kept[0] += 1; number = kept[0]"),
    "position": ("mmap.mmap(-1, 99)", "kept.read(1); number = kept.tell()"),
    "memory": ("memoryview(bytearray(9))", "kept[0] += 1; number = kept[0]"),
    "byte array": ("bytearray(9)", "kept[0] += 1; number = kept[0]"),
    "typed": ("array.array('d', [0])", "kept[0] += 1; number = kept[0]"),
    "ctypes": ("ctypes.c_double(0)", "kept.value += 1; number = kept.value"),
    "value": ("multiprocessing.Value('d', 0)", "kept.value += 1; number = kept.value"),
    "range": ("iter(range(99))", "number = next(kept)"),
    "cycle": ("itertools.cycle([1, 2, 3, 5, 8])", "number = next(kept)"),
    "count": ("itertools.count()", "number = next(kept)"),
    "zip": ("zip(itertools.count(), itertools.repeat(1))", "number = sum(next(kept))"),
    "generator": ("count_up()", "number = next(kept)"),
    "map of a method": ("map(Holder([1]).get().append, range(9))", "next(kept, 0); number = 1"),
    "queue": ("queue.Queue()", "kept.put(1); number = kept.qsize()"),
    "simple queue": ("queue.SimpleQueue()", "kept.put(1); number = kept.qsize()"),
    "metric": (
        "__import__('torchmetrics').MeanMetric()",
        "kept.update(len(kept._forward_hooks) + 1.0 + float(kept.weight)); number = kept.weight",
    ),
    "nothing": ("torch.nn.ReLU()", "number = 1"),
}
PLACES = {
    "a module": ("model.kept = kept", "model.kept"),
    "a submodule": ("model.net.kept = kept", "model.net.kept"),
    "a list": ("model.kept = [0, [kept]]", "model.kept[1][0]"),
    "a tuple": ("steering.kept = (0, (kept,))", "steering.kept[1][0]"),
    "a dict": ("model.kept = {'a': {1: kept}}", "model.kept['a'][1]"),
    "a callback": ("steering.kept = kept", "steering.kept"),
    "an object": ("model.kept = Holder(kept)", "model.kept.kept"),
    "a record": ("model.kept = Record(kept)", "model.kept.kept"),
    "slots": ("model.kept = Slotted(); model.kept.kept = kept", "model.kept.kept"),
    "a namespace": ("model.kept = types.SimpleNamespace(kept=kept)", "model.kept.kept"),
    "a file": ("globals()['KEPT'] = kept", "KEPT"),
    "a helper class": ("Helper.kept = kept", "Helper.kept"),
    "the class of the model": ("Model.kept = kept", "Model.kept"),
    "a function": ("identity.kept = kept", "identity.kept"),
    "a default": ("identity.__defaults__ = (kept,)", "identity()"),
    "a closure": ("steering.get = keep(kept)", "steering.get()"),
    "a partial": ("model.get = functools.partial(identity, kept)", "model.get()"),
    "a keyword": ("model.get = functools.partial(identity, kept=kept)", "model.get()"),
    "a method": ("model.get = Holder(kept).get", "model.get()"),
    "a map": ("model.kept = collections.ChainMap({}, {'a': kept})", "model.kept['a']"),
    "a user list": ("model.kept = collections.UserList([kept])", "model.kept[0]"),
    "a variable of the context": ("VAR.set(kept)", "VAR.get()"),
    "a dataset": ("data.kept = kept", "data.kept"),
    "an optimizer's schedule": (
        "globals()['SCHEDULE'] = kept",
        "trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].keywords['kept']",
    ),
}
HOOKS = [
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_optimizer_step", "on_after_backward", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_before_zero_grad"),
]


class Saver(L.Callback):
    """Saves checkpoints within an epoch and between two."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in (2, 5):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "3.ckpt")


def train(source, folder, resume=None, **words):
    """Train as a process of its own would; return the bytes of the weights."""
    program = sys.modules["written"] = ModuleType("written")
    program.__file__ = __file__
    exec(source, vars(program))  # noqa: S102 - the program of this test
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": False},
        max_epochs=3,
        num_sanity_val_steps=0,
        callbacks=[
            DeterminismCallback(seed=3, ledger_dir=folder, **words),
            program.steering,
            *([] if resume else [Saver(folder)]),
        ],
    )
    loader = program.DataLoader(program.data, 4)
    trainer.fit(program.model, loader, loader, ckpt_path=resume)
    return b"".join(own.detach().numpy().tobytes() for own in program.model.parameters())


def write(kind, place, hook="on_train_batch_start"):
    """Return the source of a program."""
    (make, change), (put, get) = KINDS[kind], PLACES[place]
    return PROGRAM % {"make": make, "change": change, "put": put, "get": get, "hook": hook}


def resume(source, folder, new_process, step, *, checked=True):
    """Return whether a resumed run ends as a straight one; an error if it is refused.

    Unless it is ``checked``, the ledger of what followed the checkpoint is gone.
    """
    new_process()
    straight = train(source, folder)
    new_process()
    if not checked:
        shutil.rmtree(folder / "fit-000")
    try:
        return train(source, folder, folder / f"{step}.ckpt") == straight
    except InexactResumeError as error:
        return error


EQUAL = [
    *(("list", "a helper class"), ("tensor", "a function"), ("list", "a partial")),
    *(("list", "a method"), ("dict", "a map"), ("object", "a variable of the context")),
    *(("closure", "an optimizer's schedule"), ("rows", "a callback"), ("frozen", "a module")),
    *(
        ("method", "the class of the model"),
        ("shared", "a dataset"),
        ("changed in a set", "a module"),
    ),
]


@pytest.mark.parametrize(("kind", "place"), EQUAL)
def test_state_at_unusual_places_is_restored(tmp_path, new_process, kind, place):
    assert resume(write(kind, place), tmp_path, new_process, 5) is True


REFUSED = [
    *(("text", "a module"), ("own text", "a module"), ("file", "a module"), ("map", "a dict")),
    *(("memory", "a dataset"), ("value", "a callback"), ("ctypes", "a list"), ("range", "a file")),
    *(("objects", "a callback"), ("generator", "a closure")),
    ("simple queue", "an object"),
]


@pytest.mark.parametrize(("kind", "place"), REFUSED)
def test_what_has_no_plain_form_is_refused(tmp_path, new_process, kind, place):
    error = resume(write(kind, place), tmp_path, new_process, 5, checked=False)
    (_, get) = PLACES[place]
    name = {"a dataset": "0.dataset", "a file": "written.KEPT", "a closure": "kept"}
    assert name.get(place, get.partition(".")[2].partition("[")[0]) in str(error)
    assert "0x" not in str(error)


def test_what_nothing_can_read_is_accepted_by_name_or_checked(tmp_path, new_process):
    source = write("generator", "a module") + "model.kept.close()\nmodel.kept = keep_open()\n"
    source = source.replace("def put(", "def keep_open():\n    yield\n\ndef put(")
    source = source.replace("number = next(kept)", "number = 1")
    assert resume(source, tmp_path / "checked", new_process, 5) is True
    error = resume(source, tmp_path, new_process, 5, checked=False)
    assert "Nothing can read model.kept" in str(error)
    new_process()
    train(source, tmp_path, tmp_path / "5.ckpt", accepted_unknown="model.*")


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    place=st.sampled_from(sorted(PLACES)),
    hook=st.sampled_from(HOOKS),
    step=st.sampled_from([2, 3, 5]),
)
def test_a_program_is_resumed_exactly_or_refused(tmp_path, new_process, kind, place, hook, step):
    assert resume(write(kind, place, hook), tmp_path, new_process, step)
