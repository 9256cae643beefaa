"""Programs with state of any kind, at any place, that any hook changes, and what a resume does."""

# ruff: noqa: ISC004 - lines of programs

import logging
import os
import shutil
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from types import ModuleType
from warnings import catch_warnings, simplefilter

import lightning.pytorch as L
import torch
from lightning.fabric.utilities import registry
from trainings import QUIET

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback, InexactResumeError
from lightning_d9m.engine.control import session
from lightning_d9m.tools.launch.processes import make_rank_variables

PROGRAM = """
import argparse, array, collections, contextvars, ctypes, csv, dataclasses, datetime, decimal, enum
import fractions, functools, hashlib, io, itertools, mmap, multiprocessing, pathlib, queue, random
import sqlite3, sys, tempfile, threading, types, uuid, weakref
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

class Meta(type):
    kept = None

class Base(metaclass=Meta):
    pass

class Derived(Base):
    @staticmethod
    def static(kept=None):
        return kept
    @classmethod
    def own(cls):
        return cls

class Descriptor:
    def __init__(self):
        self.held = weakref.WeakKeyDictionary()
    def __get__(self, owner, _):
        return self.held[owner]
    def __set__(self, owner, kept):
        self.held[owner] = kept

class Described:
    kept = Descriptor()

class Lazy:
    def __init__(self, kept):
        self.__dict__["held"] = kept
    def __getattr__(self, name):
        return self.__dict__["held"]

class Draws(random.Random):
    pass

def one():
    return 1

def two():
    return 2

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

def leave(*_, kept):
    pass

def count_up():
    number = 0
    while True:
        number += 1
        yield number

def keep(kept):
    return lambda: kept

def run(kept):
    while True:
        yield kept

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

def schedule(kept):
    def factor(step, *new):
        nonlocal kept
        if new:
            (kept,) = new
        return 1.0
    return factor

def read(trainer):
    return %(get)s

def steer(*_):
    if (trainer := model._trainer) is None:
        return 0.0
    kept = read(trainer)
    %(change)s
    if trainer.global_step < BEGIN:
        return 0.0
    with torch.no_grad():
        model.net.bias.add_(1e-2 * float(number))
    return 1e-2 * float(number)

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
        if "CLOSED" in globals():
            factor = schedule(globals().pop("CLOSED"))
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factor)]

class Steering(L.Callback):
    pass

def call_before(owner, name):
    # Or in one that it lacks.
    before = getattr(owner, name, None)
    def method(self, *args, **words):
        number = steer()
        found = before(self, *args, **words) if before else None
        return found + number if owner is Data else found  # also of a worker
    setattr(owner, name, method)

def load_data():
    # In a library, where nothing finds them that is not found through the loader.
    here = torch.here = types.SimpleNamespace(data=Data())
    here.sampler = torch.utils.data.SequentialSampler(here.data)
    here.loader = DataLoader(here.data, 4, sampler=here.sampler, **WORKERS)
    return here.loader

def put(kept):
    %(put)s

BEGIN, OPTIONS, WORKERS = 0, {"max_epochs": 3}, {}
%(draws)s
call_before(%(hook)s)
model, steering, first = Model(), Steering(), load_data()
if "train_dataloader" not in vars(Model):
    data, sampler, loader = torch.here.data, torch.here.sampler, torch.here.loader
put(%(make)s)
"""
# fmt: off
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
    "metric": ("__import__('torchmetrics').MeanMetric()",
        "kept.update(len(kept._forward_hooks) + 1.0 + float(kept.weight)); number = kept.weight"),
    "number": ("0", "put(kept + 1); number = kept"),
    "string": ("''", "put(kept + 'x'); number = len(kept)"),
    "pair": ("(1, [1])", "put((kept[0] + 1, kept[1])); kept[1].append(1); number = len(kept[1])"),
    "frozen set": ("frozenset()", "put(kept | {len(kept)}); number = len(kept)"),
    "decimal": ("decimal.Decimal(1)", "put(kept + 1); number = kept"),
    "fraction": ("fractions.Fraction(1, 2)", "put(kept + 1); number = kept"),
    "date": ("datetime.date(2000, 1, 1)",
        "put(kept.replace(day=kept.day % 9 + 1)); number = kept.day"),
    "delta": ("datetime.timedelta(0)", "put(kept + datetime.timedelta(1)); number = kept.days"),
    "uuid": ("uuid.UUID(int=1)", "put(uuid.UUID(int=kept.int + 1)); number = kept.int"),
    "path": ("pathlib.Path('a')", "put(kept / 'b'); number = len(kept.parts)"),
    "member": ("Color.RED", "put(Color(3 - kept.value)); number = kept.value"),
    "code": ("one", "put(two if kept is one else one); number = kept()"),
    "class": ("Base", "put(Derived if kept is Base else Base); number = kept is Base"),
    "type": ("torch.float32",
        "put(torch.float64 if kept is torch.float32 else torch.float32); number = kept.itemsize"),
    "slice": ("slice(0, 1)", "put(slice(0, kept.stop + 1)); number = kept.stop"),
    "numeral": ("np.float32(0)", "put(kept + np.float32(1)); number = kept"),
    "complex": ("torch.zeros(2, dtype=torch.complex64)", "kept.add_(1j); number = kept[0].imag"),
    "sparse": ("torch.zeros(2).to_sparse()",
        "kept.add_(torch.ones(2).to_sparse()); number = kept.to_dense()[0]"),
    "new tensor": ("torch.zeros(2)", "put(kept + 1); number = kept[0]"),
    "grown": ("torch.zeros(1)", "put(torch.cat([kept, kept + 1])[-9:]); number = kept.sum()"),
    "parameter": ("(torch.nn.Parameter(torch.zeros(2)),)",
        "kept[0].data.add_(1); number = kept[0][0]"),
    "structured": ("np.zeros(2, [('a', 'f4')])", "kept['a'] += 1; number = kept['a'][0]"),
    "array of objects": ("np.array([0, None])", "kept[0] += 1; number = kept[0]"),
    "module": ("(torch.nn.Linear(1, 1),)",
        "kept[0].weight.data.fill_(float(kept[0].weight) + 1); number = kept[0].weight"),
    "mode": ("(torch.nn.Dropout(),)", "kept[0].p = 1 - kept[0].p / 2; number = kept[0].p"),
    "default": ("collections.defaultdict(list)", "kept[1].append(1); number = len(kept[1])"),
    "enum key": ("{Color.RED: 1}", "kept[Color.RED] += 1; number = kept[Color.RED]"),
    "tuple key": ("{(1, 2): 1}", "kept[1, 2] += 1; kept[len(kept), 0] = 1; number = kept[1, 2]"),
    "object key": ("{one: 1}", "kept[one] += 1; number = kept[one]"),
    "nested": ("{'a': [[1], {2: [3]}]}",
        "kept['a'][1][2].append(1); number = len(kept['a'][1][2])"),
    "long": ("[0] * 2000", "kept[1500] += 1; number = kept[1500]"),
    "long of objects": ("[Holder(0) for _ in range(1500)]",
        "kept[7].kept += 1; number = kept[7].kept"),
    "long dict": ("dict.fromkeys(range(2000), 0)", "kept[1] += 1; number = kept[1]"),
    "cycle of objects": ("Holder([0])", "kept.kept += [kept]; number = len(kept.kept)"),
    "linked": ("Holder(None)", "put(Holder(kept)); number = kept.kept is None"),
    "described": ("Described()",
        "kept.kept = getattr(kept, '_', 0) + 1; kept._ = kept.kept; number = kept.kept"),
    "lazy": ("Lazy([0])", "kept.any.append(1); number = len(kept.other)"),
    "own draws": ("Draws(1)", "number = kept.random()"),
    "cache": ("functools.lru_cache(lambda key: [])", "kept(1).append(1); number = len(kept(1))"),
    "thread": ("threading.local()", "kept.n = getattr(kept, 'n', 0) + 1; number = kept.n"),
    "semaphore": ("threading.Semaphore(99)", "kept.acquire(); number = kept._value"),
    "event": ("threading.Event()",
        "(kept.clear if kept.is_set() else kept.set)(); number = kept.is_set()"),
    "lock": ("threading.Lock()",
        "(kept.release if kept.locked() else kept.acquire)(); number = kept.locked()"),
    "weak": ("weakref.WeakValueDictionary()", "kept[len(kept)] = steering; number = len(kept)"),
    "weak keys": ("weakref.WeakKeyDictionary({one: 0})", "kept[one] += 1; number = kept[one]"),
    "hash": ("hashlib.md5()", "kept.update(b'x'); number = kept.digest()[0] / 99"),
    "context": ("decimal.Context()", "kept.prec += 1; number = kept.prec / 9"),
    "database": ("sqlite3.connect(':memory:')", "kept.execute('create table if not exists t(n)'); "
        "kept.execute('insert into t values(1)'); "
        "number = kept.execute('select count(*) from t').fetchone()[0]"),
    "reader": ("csv.reader(map(str, range(99)))", "number = int(next(kept)[0])"),
    "enumerate": ("enumerate(itertools.count())", "number = next(kept)[0]"),
    "reversed": ("reversed(range(99))", "number = next(kept) / 9"),
    "list iterator": ("iter([*range(99)])", "number = next(kept)"),
    "filter": ("filter(None, range(99))", "number = next(kept)"),
    "shared array": ("multiprocessing.Array('d', 3)", "kept[0] += 1; number = kept[0]"),
    "queue of a process": ("multiprocessing.SimpleQueue()",
        "kept.put(1) if kept.empty() else kept.get(); number = kept.empty()"),
    "exception": ("ValueError(1)", "kept.args = (kept.args[0] + 1,); number = kept.args[0]"),
    "proxy": ("types.MappingProxyType({'a': [1]})", "kept['a'].append(1); number = len(kept['a'])"),
    "arguments": ("argparse.Namespace(n=1)", "kept.n += 1; number = kept.n"),
    "sampler": ("torch.utils.data.RandomSampler(range(9), generator=torch.Generator())",
        "number = next(iter(kept))"),
    "optimizer": ("torch.optim.SGD([torch.zeros(1)], 1.0, momentum=0.9)",
        "kept.param_groups[0]['lr'] *= 0.9; number = kept.param_groups[0]['lr']"),
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
    "a dataset": ("torch.here.data.kept = kept", "torch.here.data.kept"),
    "an alias": ("model.kept = kept; steering.other = [kept]",
        "(model.kept, steering.other[0])[trainer.global_step % 2]"),
    "the Trainer": ("globals()['KEPT'] = kept; Model.setup = lambda self, stage: "
        "setattr(self.trainer, 'kept', KEPT)", "trainer.kept"),
    "a loader": ("torch.here.loader.kept = kept", "torch.here.loader.kept"),
    "a sampler": ("torch.here.sampler.kept = kept", "torch.here.sampler.kept"),
    "an optimizer": ("globals()['KEPT'] = kept",
        "vars(trainer.optimizers[0]).setdefault('kept', KEPT)"),
    "a group": ("globals()['KEPT'] = kept",
        "trainer.optimizers[0].param_groups[0].setdefault('kept', KEPT)"),
    "a scheduler": ("globals()['KEPT'] = kept",
        "vars(trainer.lr_scheduler_configs[0].scheduler).setdefault('kept', KEPT)"),
    "a parameter": ("model.net.weight.kept = kept", "model.net.weight.kept"),
    "a hook of a module": ("model.net.register_forward_hook(functools.partial(leave, kept=kept))",
        "[*model.net._forward_hooks.values()][0].keywords['kept']"),
    "a base class": ("Base.kept = kept", "Derived.kept"),
    "a metaclass": ("Meta.kept = kept", "Base.kept"),
    "a static method": ("Derived.static.__defaults__ = (kept,)", "Derived.static()"),
    "a class method": ("Derived.own.__func__.kept = kept", "Derived.own.kept"),
    "a running generator": ("model.get = run(kept)", "next(model.get)"),
    "a member": ("Color.RED.kept = kept", "Color.RED.kept"),
    "an exception": ("model.kept = ValueError(kept)", "model.kept.args[0]"),
    "a proxy": ("model.kept = types.MappingProxyType({1: kept})", "model.kept[1]"),
    "arguments": ("model.kept = argparse.Namespace(kept=kept)", "model.kept.kept"),
    "a descriptor": ("model.kept = Described(); model.kept.kept = kept", "model.kept.kept"),
    "a lazy object": ("model.kept = Lazy(kept)", "model.kept.any"),
    "a cache": ("model.get = functools.lru_cache(keep(kept))", "model.get()"),
    "a property": ("Model.kept = property(functools.partial(lambda kept, _: kept, kept))",
        "model.kept"),
    "another thread's": ("model.kept = threading.local(); model.kept.kept = kept",
        "model.kept.kept"),
    "a file that was imported": ("file = sys.modules['written_helper'] = types.ModuleType("
        "'written_helper'); file.__file__ = __file__; file.kept = kept; "
        "globals()['written_helper'] = file", "written_helper.kept"),
    "a deque": ("model.kept = collections.deque([kept])", "model.kept[0]"),
    "an array": ("model.kept = np.array([None]); model.kept[0] = kept", "model.kept[0]"),
    "hyperparameters": ("model.save_hyperparameters({'kept': [kept]})", "model.hparams['kept'][0]"),
    "an optimizer's schedule": ("globals()['SCHEDULE'] = kept",
        "trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].keywords['kept']"),
    "a schedule's closure": ("globals().update(CLOSED=kept) if model._trainer is None else "
        "model._trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0](0, kept)",
        "trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].__closure__[0].cell_contents"),
}
_WORKERS, _RELOADS = "WORKERS |= {'num_workers': 2}; ", "Model.train_dataloader = lambda self: "
_EACH, _SECOND = (f"; OPTIONS |= {{'reload_dataloaders_every_n_epochs': {n}}}" for n in (1, 2))
# Each is drawn as often as it is named here; "" leaves the program as it is.
DRAWS = {
    "loading": {
        "": "",
        "workers": _WORKERS,
        "persistent workers": _WORKERS + "WORKERS |= {'persistent_workers': True}",
        "new data": _RELOADS + "(load_data(), put(%(make)s))[0]" + _EACH,
        "new data by workers": _WORKERS + _RELOADS + "(load_data(), put(%(make)s))[0]" + _EACH,
        "data that go on": _RELOADS + "(read(self.trainer), load_data())" + _EACH
            + "; before = Model.train_dataloader; Model.train_dataloader = lambda self: "
            "(lambda kept, loader: (put(kept), loader)[1])(*before(self))",
        "new data at times": _RELOADS + "(load_data(), put(%(make)s))[0]" + _SECOND,
        "the same data": _RELOADS + "first" + _EACH,
    },
    "validation": {"": "", "each batch": "OPTIONS |= {'val_check_interval': 1}"},
    # Later than the third step after a checkpoint.
    "begin": {"": "", "late": "BEGIN = 9; OPTIONS |= {'max_epochs': 4}"},
    "saving": {
        "": "",
        "a callback": "Steering.state_dict = lambda self: {'kept': read(model._trainer)}; "
            "Steering.load_state_dict = lambda self, state: put(state['kept'])",
        "the module": "Model.on_save_checkpoint = lambda self, file: "
            "file.update(kept=read(self.trainer)); "
            "Model.on_load_checkpoint = lambda self, file: put(file['kept'])",
    },
}
# How the run ends from which another one resumes, besides that it trains to its end: killed by the
# save or a later one, by ``max_epochs`` or by ``max_steps`` before one.
ENDS = ("", "killed", "killed later", "max_epochs", "max_steps")
LATER = {2: 3, 3: 5, 9: 5, 8: 5, 5: 6, 7: 6, 6: 6}  # see ``Saver``
# fmt: on
HOOKS = [
    *(
        f"Steering, {name!r}"
        for name in (
            *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start"),
            *("on_train_epoch_end", "on_before_optimizer_step", "on_after_backward"),
            *("on_validation_batch_end", "on_validation_epoch_end", "on_before_zero_grad"),
            *("on_train_start", "on_validation_start", "on_validation_end"),
        )
    ),
    *(
        f"Model, {name!r}"
        for name in (
            *("training_step", "on_train_batch_start", "on_train_batch_end", "backward"),
            *("optimizer_step", "lr_scheduler_step", "configure_gradient_clipping"),
            *("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"),
            *("validation_step", "on_save_checkpoint", "transfer_batch_to_device"),
        )
    ),
    "torch.optim.lr_scheduler.LambdaLR, 'get_lr'",
    "Data, '__getitem__'",
]
# Only the check of the first steps detects what hooks change there, as docs/resume.md says.
CHECKED = ("a loader", "a sampler")
STEPS = (2, 3, 5, 6, 7)  # see ``Saver``
STEPS_WITHIN = (8, 9)  # those that only validations within an epoch have


class Saver(L.Callback):
    """Saves checkpoints within an epoch, between two, within a validation and after it.

    The process is killed after the save of the number ``last``.
    """

    def __init__(self, folder, last=None):
        self.folder, self.last = folder, last

    def save(self, trainer, number):
        trainer.save_checkpoint(self.folder / f"{number}.ckpt")
        if number == self.last:
            os._exit(0)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in (2, 5):
            self.save(trainer, trainer.global_step)

    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == 0:
            self.save(trainer, 3)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step in (4, 6) and batch_idx == 2:  # the last one within it
            self.save(trainer, {4: 9, 6: 7}[trainer.global_step])

    def on_validation_end(self, trainer, *_):
        if trainer.global_step in (4, 6):
            self.save(trainer, {4: 8, 6: 6}[trainer.global_step])


def write(kind, place, hook="Steering, 'on_train_batch_start'", lines="", **draws):
    """Return the source of a program, with further lines."""
    (make, change), (put, get) = KINDS[kind], PLACES[place]
    lines = "\n".join([*(DRAWS[name][drawn] for name, drawn in draws.items()), lines])
    parts = {"make": make, "change": change, "put": put, "get": get, "hook": hook}
    return PROGRAM % {**parts, "draws": lines.replace("%(make)s", make)}


def train(source, folder, resume=None, options=(), last=None, saved=None, strategy="auto", **words):
    """Train as a process of its own would, or a rank; return the bytes of the weights.

    See ``Saver`` for ``last``; ``saved`` is the number of a checkpoint after the fit.
    """
    session.restart_fits()
    program = sys.modules["written"] = ModuleType("written")
    program.__file__ = __file__
    exec(source, vars(program))  # noqa: S102 - the program of this test
    saves = folder / "resumed" if resume else folder
    saves.mkdir(exist_ok=True, parents=True)
    given = {**QUIET, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(
        **{**given, **program.OPTIONS, **dict(options)},
        strategy=strategy,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=[
            DeterminismCallback(seed=3, ledger_dir=folder, **words),
            program.steering,
            Saver(saves, last),
        ],
    )
    checkpoint = resume and folder / f"{resume}.ckpt"
    loads, loader = "train_dataloader" in vars(program.Model), program.first
    trainer.fit(program.model, None if loads else loader, loader, ckpt_path=checkpoint)
    if saved:
        trainer.save_checkpoint(saves / f"{saved}.ckpt")
    whole = [getattr(own, "full_tensor", own.detach)() for own in program.model.parameters()]
    return b"".join(own.detach().numpy().tobytes() for own in whole)


def resume(source, folder, step, *, checked=True, **words):
    """Return whether a resumed run ends as a straight one, or the error by which it is refused.

    Unless it is ``checked``, the ledger of what followed the checkpoint is gone.
    """
    straight = train(source, folder)
    if not checked:
        shutil.rmtree(folder / "fit-000")
    try:
        return train(source, folder, step, **words) == straight
    except InexactResumeError as error:
        return str(error)


def judge(source, folder, step, end=""):
    """Return what becomes of a resumed program: one word, and the error.

    The run that saved the checkpoint ended in one of ``ENDS``.
    """
    straight = in_fork(lambda: train(source, folder))
    if end:
        shutil.rmtree(folder, ignore_errors=True)
        step = {"max_epochs": 3, "max_steps": 5}.get(end, step)
        last = {"killed": step, "killed later": LATER[step]}.get(end)
        words = {"last": last} if last else {"saved": step}
        options = {"max_epochs": {"max_epochs": 1}, "max_steps": {"max_steps": 5}}.get(end, {})
        in_fork(lambda: train(source, folder, options=options, **words))

    def resumed(**words):
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("lightning_d9m").addHandler(handler)
        weights = train(source, folder, step, **words)
        return bytes([any("cannot be compared with" in text for text in said)]) + weights

    found = in_fork(resumed)
    said = isinstance(found, bytes) and found[0]
    found = found[1:] if isinstance(found, bytes) else found
    word = name_outcome(straight, found)
    if word == "silent" and said:
        word = "said"
    if word == "refused":
        again = in_fork(lambda: resumed(on_inexact_resume="warn"))
        word = "needless" if again[1:] == straight else "refused"
    shutil.rmtree(folder, ignore_errors=True)
    return word, "" if isinstance(found, bytes) else found


def name_outcome(straight, found):
    """Return a word for what a straight run and a resumed one have returned, or their errors."""
    if isinstance(straight, str):
        return "failed"
    if isinstance(found, bytes):
        return "equal" if found == straight else "silent"
    if "The resumed run differs" in found:
        return "ended"
    return "refused" if "InexactResumeError" in found else "failed"


def in_fork(function):
    """Return what a function returns in a process that has imported all; the text of an error.

    A program in it may change what it likes, libraries too.
    """
    return in_forks([function])[0]


def in_forks(functions):
    """Return what functions return, each in a process, side by side."""
    with ExitStack() as stack:
        answers = [stack.enter_context(TemporaryFile()) for _ in functions]
        processes = [*map(fork, functions, answers)]
        found = []
        for process, answer in zip(processes, answers, strict=True):
            os.waitpid(process, 0)
            answer.seek(0)
            text = answer.read()
            found.append(text[1:] if text[:1] == b"+" else text.decode())
        return found


def on_ranks(function, count):
    """Return what a function returns on rank 0 of several, or alone."""

    def run(variables):
        os.environ |= variables
        return function()

    ranks = make_rank_variables(count) if count > 1 else [{}]
    return in_forks([partial(run, own) for own in ranks])[0]


def fork(function, answer):
    """Call a function in a process, which writes what that returns; return the process."""
    if process := os.fork():
        return process
    try:
        torch.set_num_threads(1)  # threads of the parent are not there
        simplefilter("default")  # torch warns of the variable, an error only in pytest
        # Groups and hyperparameters may have objects.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        answer.write(b"+" + function())
    except BaseException:  # noqa: BLE001 - the program fails, whatever for
        answer.write(traceback.format_exc().encode())
    finally:
        answer.flush()
        os._exit(0)


def judge_ranks(source, folder):
    """Return what becomes of a program with two logical ranks, on one process and on two."""

    def run():
        strategy = DDPDeterministicStrategy(logical_ranks=2)
        with catch_warnings(record=True) as caught:
            simplefilter("always")
            weights = train(source, folder / os.environ.get("RANK", "one"), strategy=strategy)
        said = any("depend on the number of" in str(own.message) for own in caught)
        return bytes([said]) + weights

    one, two = (on_ranks(run, count) for count in (1, 2))
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(one, str) or isinstance(two, str):
        texts = [own for own in (one, two) if isinstance(own, str)]
        refused = all("SettingError" in own for own in texts) and len(texts) == 2
        return "refused" if refused else "failed", "\n".join(texts)
    if one[1:] == two[1:]:
        return "equal", ""
    return ("warned" if one[0] else "silent"), ""


def search(seed, count, folder, *, ranks=False):
    """Judge programs at random; write each that is not equal, and how many there were of each."""
    draw = Random(seed)
    counts = Counter()
    torch.set_num_threads(1)
    # What a first training imports and looks up is then there in each fork. Each Trainer asks all
    # packages for plug-ins, which takes a tenth of a training.
    registry.entry_points = cache(registry.entry_points)
    train(write("nothing", "a module"), folder)
    shutil.rmtree(folder)
    for _ in range(count):
        chosen = [draw.choice([*options]) for options in (KINDS, PLACES, HOOKS, STEPS)]
        if ranks:
            source = write(*chosen[:2], draw.choice(["Model, 'training_step'", chosen[2]]))
            word, error = judge_ranks(source, folder)
        else:
            # Mostly few others, so that a program shows one thing.
            others = {name: draw.choice(["", "", *own]) for name, own in DRAWS.items()}
            if others["loading"] and draw.random() < 0.5:  # a dataset that keeps state
                chosen[1] = draw.choice(["a dataset", "a sampler", "a loader", "a file"])
                chosen[2] = draw.choice([chosen[2], "Data, '__getitem__'"])
            if others["validation"]:
                chosen[3] = draw.choice([*STEPS, *STEPS_WITHIN])
            end = draw.choice(["", "", "", *ENDS])
            if chosen[1] in CHECKED:
                others["begin"] = end = ""
            source = write(*chosen[:3], **others)
            word, error = judge(source, folder, chosen[3], end)
            chosen += [own for own in (*others.values(), end) if own]
        counts[word] += 1
        if word != "equal":
            sys.stdout.write(f"{word} {chosen} | {error[-1500:]!r}\n")
    sys.stdout.write(f"{dict(counts)}\n")


if __name__ == "__main__":
    search(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), ranks="ranks" in sys.argv)
