"""Controlled loaders, whose order and workers depend only on (seed, epoch).

This module knows torch's ``DataLoader``, not Lightning. ``release`` restores every replaced
attribute of the user's objects. Objects that are sent to workers must be picklable (``spawn``), so
these have no closures.
"""

import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.attribute_patches import AttributePatches, replace_method
from lightning_d9m.engine.control.data.data_state import (
    DATA,
    LOADER,
    LOGGED_DATA,
    UNKNOWN_DATA,
    UNSAVED_DATA,
    DataState,
    WorkerWatch,
)
from lightning_d9m.engine.control.data.resumable_sampler import (
    RANKLESS,
    MicroBatches,
    ResumableSampler,
    SeededIndex,
    copy_loader,
    find_samplers,
    has_state,
    is_user_made,
    make_generator,
)
from lightning_d9m.engine.control.environment import threads_pinned
from lightning_d9m.engine.control.seeding import RandomStreams, SeededHost, seed_host
from lightning_d9m.engine.control.session import capture_session, start_worker
from lightning_d9m.engine.state.parts import is_of_program
from lightning_d9m.engine.state.state import find_generators
from lightning_d9m.errors import SettingError


def init_worker(
    stream: RandomStreams,
    user_function: Callable[[int], None] | None,
    is_first: bool,
    worker: int,
) -> None:
    """Seed a worker when it starts, then call the user's own ``worker_init_fn``."""
    # A loader that is iterated again within an epoch (the shorter of two) gets new workers, which
    # must not repeat the draws. torch draws a different base seed for them.
    info: Any = get_worker_info()
    index = 0 if is_first else info.seed - worker
    seed_host(stream.derive("worker", worker=worker, index=index))
    if user_function is not None:
        user_function(worker)


class SeededDataset:
    """Makes the batches of a dataset; each begins with its own seed.

    It stands for the user's dataset in the iterators of a loader. A ``worker_init_fn`` sees and
    sets the attributes of the dataset, by which it can split a stream among workers.

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise before each batch, by
            (seed, rank, epoch, number of the batch).
        collate: The user's ``collate_fn``, which continues the random streams of its samples; None
            for an iterable dataset.
        state: The state of the main process's objects, which the first batch may complete.
    """

    def __init__(
        self,
        dataset: Any,
        stream: RandomStreams,
        per_sample: bool = False,
        collate: Any = None,
        state: DataState | None = None,
    ) -> None:
        vars(self).update(
            _dataset=dataset, _stream=stream, _per_sample=per_sample, _collate=collate,
            _state=state, _watch=None, _iterated=False,
        )  # fmt: skip

    @property  # type: ignore[misc] # `isinstance` reads it, of the dataset that this stands for
    def __class__(self) -> type:
        return type(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, self._stream, self._per_sample, self._collate)

    def __iter__(self) -> Iterator[Any]:
        # Called in a worker at its start, after `init_worker` has seeded it, and in every epoch.
        info = get_worker_info()
        if self._iterated and info is not None and self._stream.follow():
            seed_host(self._stream.derive("worker", worker=info.id))
        vars(self)["_iterated"] = True
        samples, watch = iter(self._dataset), self._find_watch()
        return samples if watch is None else watch.watch(samples)

    def _find_watch(self) -> WorkerWatch | None:
        """Return what looks for changes in this worker; None in the main process."""
        if get_worker_info() is None or self._stream.report is None:
            return None
        if self._watch is None:
            owners = {"dataset": self._dataset, "collate_fn": self._collate}
            vars(self)["_watch"] = WorkerWatch(owners, self._stream.report_change)
        return self._watch  # type: ignore[no-any-return]

    def __getitem__(self, request: Any) -> Any:
        """Return what a loader gives for one index, if it does not batch."""
        if not isinstance(request, SeededIndex):
            return self._dataset[request]  # the program reads a sample, as in `worker_init_fn`
        return self._load(request, self._fetch_sample)

    def __getitems__(self, request: Any) -> Any:
        """Return a batch, or the micro-batches of logical ranks."""
        if isinstance(request, SeededIndex):
            return self._load(request, self._fetch_batch)
        if not all(isinstance(part, SeededIndex) for part in request):  # the program's, as above
            fetch = getattr(self._dataset, "__getitems__", None)
            return fetch(request) if fetch else [self._dataset[index] for index in request]
        return MicroBatches(map(self.__getitems__, request))

    def _load(self, request: SeededIndex, fetch: Callable[[Any, int], Any]) -> Any:
        watch = self._find_watch()
        if get_worker_info() is None:
            with SeededHost(request.seed):
                batch = self._collate(fetch(request.indices, request.epoch))
        else:  # where the generators need not be restored
            seed_host(request.seed)
            batch = self._collate(fetch(request.indices, request.epoch))
        if watch is not None:
            watch.end_batch()
        elif self._state is not None:
            self._state.settle()
            vars(self)["_state"] = None
        return batch

    def _fetch_batch(self, indices: Any, epoch: int) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        # With a seed per sample, fetch them one by one.
        if fetch is None or self._per_sample:
            return [self._fetch_sample(index, epoch) for index in indices]
        return fetch(indices)

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        if self._per_sample:
            stream = self._stream
            if stream.epoch != epoch:  # in a worker that started in a different epoch
                stream = replace(stream, epoch=epoch, shared=None)
            seed_host(stream.derive("sample", index=_index_text(index), shared=True))
        return self._dataset[index]


def _load_on_one_thread(load: Callable[[], Any]) -> Any:
    """Load a batch with as many threads as torch gives a worker: sums round by their number."""
    with threads_pinned(1):
        return load()


def return_batch(batch: Any) -> Any:
    """Return what a ``SeededDataset`` has made: the ``collate_fn`` of an iterator."""
    return batch


def _index_text(index: Any) -> int | str:
    """Return the identity of a sample as text, independent of the type of its numbers."""
    if isinstance(index, str):
        return repr(str(index))
    if isinstance(index, float):
        return float(index).hex()
    if isinstance(index, tuple | list):
        return f"({','.join(str(_index_text(part)) for part in index)})"
    try:
        return operator.index(index)
    except TypeError:
        raise SettingError(
            f"per_sample_rng is on and the sampler gives {index!r} as an index; allowed: integers, "
            "strings, floats, and tuples or lists of them, because the seed of a sample is "
            "derived from its index. Change the sampler, or switch per_sample_rng off."
        ) from None


# torch adds the epoch to a DistributedSampler's seed, and subclasses of users may pass the sum to
# generators with 32-bit seeds.
_SAMPLER_SEED = 2**31
# Those of samplers are kept as they were where the epoch began: its order is drawn again from them.
_OF_DATA = (UNKNOWN_DATA, DATA, UNSAVED_DATA, LOGGED_DATA)


class ReachedPosition(NamedTuple):
    """The position in an epoch at which its run was interrupted; see ``resume_epoch``."""

    epoch: int
    batches: int
    cycled: Callable[[], bool]
    samplers: Mapping[str, Any]


class ControlledLoader:
    """The parts of a loader that are replaced, and where an interrupted epoch continues."""

    def __init__(self, loader: Any, stage: str, control: "LoaderControl") -> None:
        self.loader = weakref.ref(loader)
        self.stage = stage
        self.stream = stream = RandomStreams(control.seed, control.fit, control.rank, stage)
        self.started: int | None = None
        self.first_epoch: int | None = None
        # The states where the epoch was first iterated, and after it was iterated in advance.
        self.start: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None
        self._has_data = False
        self._control = control
        self._iterable = iterable = isinstance(loader.dataset, IterableDataset)
        if control.per_sample_rng and iterable:
            raise SettingError(
                f"per_sample_rng is on and {type(loader.dataset).__name__} is an IterableDataset: "
                "its samples have no index to seed them by. Use a dataset with indices, or switch "
                "per_sample_rng off; runs are exact without it."
            )
        # torch draws the base seed of the workers from this generator, on the default device.
        self._generator = torch.Generator(torch.get_default_device())
        self._orders: dict[int, torch.Generator] = {}
        self._chosen: dict[int, str] = {}  # what the user's seeds add to ours
        samplers = find_samplers(loader)
        self._rankless = all(type(sampler) in RANKLESS for sampler in samplers)
        owners: dict[str, object] = {LOADER: loader} if is_of_program(type(loader)) else {}
        owners |= {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        # Workers have the dataset as it was when they started; a later change does not reach them.
        self._keeps_copies = not iterable and loader.num_workers > 0 and loader.persistent_workers
        # Only torchdata's loader saves the state that a dataset says, and that of a map is not
        # loaded, as this class restores the position.
        saves = iterable and has_state(loader)
        saved = (LOADER, "dataset") if saves else (LOADER,)
        earlier = [own.state for own in control.loaders]
        self.state: DataState = DataState(owners, samplers, earlier, saved)
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._requests = ResumableSampler(
            getattr(loader, self._place),
            stream,
            user_made=is_user_made(samplers),
            # torch makes this iterator first, and then that of the dataset.
            on_start=self._keep_start,
        )
        self._replace_parts(loader, saves=saves and has_state(loader.dataset))

    def _replace_parts(self, loader: Any, *, saves: bool) -> None:
        take_over = self._control.replacements.replace
        take_over(loader, "generator", self._generator)
        self._keep_in_order(loader)
        if loader.num_workers > 0:
            persistent = loader.persistent_workers and self._iterable
            self.stream.share(persistent=persistent, reports=not saves)
            if loader.persistent_workers:
                # Running workers do not have these streams, so torch must start new ones.
                take_over(loader, "_iterator", None)
        if not self._iterable and hasattr(loader, "load_state_dict"):
            # torchdata's loader, which then ignores it; this class restores the position.
            take_over(loader, "load_state_dict", bool)
        take_over(loader, "_get_iterator", self._make_iterator)

    def _keep_in_order(self, loader: Any) -> None:
        # With in_order=False batches come as workers finish them. torchdata's loaders and older
        # releases of torch may lack the attribute.
        if not getattr(loader, "in_order", True):
            warnings.warn(
                "A DataLoader has in_order=False, which gives batches as the workers finish them. "
                "It gives them in order while this run lasts; remove in_order=False.",
                stacklevel=4,
            )
            self._control.replacements.replace(loader, "in_order", value=True)

    def _make_iterator(self) -> Any:
        """Make an iterator of the loader, which then has our parts; the user's stay in the loader.

        Only torch's iterators read these parts, and only when they are made.
        """
        loader: Any = self.loader()
        stream, dataset, workers = self.stream, loader.dataset, loader.num_workers > 0
        parts: dict[str, Any] = {self._place: self._requests}
        if workers:
            given = (stream, loader.worker_init_fn, self.start is None)
            start = partial(init_worker, *given)
            # For loaders whose own class makes the iterator; torch's take it over twice.
            parts["worker_init_fn"] = partial(start_worker, capture_session(), start)
        if not self._iterable:
            state = None if workers else self.state
            seeded = SeededDataset(
                dataset, stream, self._control.per_sample_rng, loader.collate_fn, state
            )
            parts |= {"dataset": seeded, "collate_fn": return_batch}
        # torch itself seeds a data pipe in every epoch, and traverses it to do so.
        elif stream.shared is not None and not isinstance(dataset, IterDataPipe):
            parts["dataset"] = SeededDataset(dataset, stream)
        with ExitStack() as stack:
            for name, part in parts.items():
                replace_method(stack, loader, name, part)
            iterator = type(loader)._get_iterator(loader)  # noqa: SLF001 - torch calls it by this name
        if not workers:
            iterator._next_data = partial(_load_on_one_thread, iterator._next_data)  # noqa: SLF001 - as above
        return iterator

    @property
    def is_bypassed(self) -> bool:
        """True if the loader's epoch began without torch's iterator."""
        return self.started is not None and self.start is None

    def capture(self, *, within: bool, at_end: bool) -> dict[str, Any]:
        """Return what the order of batches depends on; see ``LoaderControl.capture_samplers``."""
        start = self.start
        if not within or start is None:
            found = self.state.capture()
            if self._keeps_copies and self.stage != "train":
                # They start in the first validation, so those of a resumed run have later values.
                late = [*filter(self._is_of_loader, found.get(DATA, ()))]
                found |= {UNSAVED_DATA: [*found.get(UNSAVED_DATA, ()), *late]} if late else {}
            return found
        # Read again from the start of the epoch; a validation is run again as a whole.
        if (self._iterable or self.stage != "train") and not at_end:
            return start
        at_start = {name: own for name, own in start.items() if name not in _OF_DATA}
        now = {name: own for name, own in self.state.capture().items() if name in _OF_DATA}
        loader = self.loader()
        if loader is not None and loader.num_workers and not (at_end or self._keeps_copies):
            # Workers have copies from the start of the epoch.
            first = start.get(DATA, {})
            changed = [
                path
                for path, own in now.get(DATA, {}).items()
                if path not in first or not torch.equal(own, first[path])
            ]
            changed = [*filter(self._is_of_loader, changed)]
            now |= {DATA: first, UNSAVED_DATA: [*now.get(UNSAVED_DATA, ()), *changed]}
        return at_start | {name: own for name, own in now.items() if own}

    def _is_of_loader(self, path: str) -> bool:
        """Return whether a path is not that of a variable of a file.

        These are restored in this process later, as part of the program.
        """
        return path.startswith(tuple(self.state.data))

    def _keep_start(self) -> None:
        if self.start is None:  # torch may make a second iterator, or cycle
            self.start = self.state.capture()

    def restore(self, samplers: Mapping[str, Any], *, data: bool = True) -> None:
        """Restore what ``capture`` returned, from that of all loaders of the stage."""
        states = samplers.get(str(self.stream.number), {})
        self.state.restore_samplers(states)
        if data:
            self.state.restore_data(states)

    def restore_data(self, epoch: int, *, within: bool) -> None:
        """Restore what the dataset held where the run was interrupted.

        Within an epoch it has been restored before workers start that end with the epoch.
        """
        reached = self._find_reached(epoch)
        if reached is not None and (self._keeps_copies or not within):
            self.state.restore_data(reached.samplers.get(str(self.stream.number), {}))
            self._has_data = True

    def _find_reached(self, epoch: int) -> ReachedPosition | None:
        reached = self._control.reached.get(self.stage)
        return reached if reached is not None and reached.epoch == epoch else None

    def start_epoch(self, epoch: int) -> None:
        """Seed the order and the workers of an epoch; continue it where it was interrupted."""
        loader = self.loader()
        if loader is None or epoch == self.started:
            return
        self._requests.draw_skipped()
        self.started = epoch
        self.start = self.after = None
        self.stream.start_epoch(epoch)
        self._generator.manual_seed(self.stream.derive("workers"))
        reached = self._find_reached(epoch)
        if reached is not None:
            # Hooks may have set the data since it was restored.
            self.restore(reached.samplers, data=not (self._has_data or self._keeps_copies))
            self._has_data = True
        self._seed_samplers(loader, epoch)
        # A loader of an iterable dataset restores its position itself, or cannot.
        if reached is not None and not self._iterable:
            self._requests.start_epoch(reached.batches, reached.cycled)
        else:
            self._requests.start_epoch()

    def _seed_samplers(self, loader: Any, epoch: int) -> None:
        for number, sampler in enumerate(find_samplers(loader)):
            chosen = self._chosen.setdefault(number, self._read_seed(sampler))
            if isinstance(sampler, DistributedSampler):
                # All ranks must split the same permutation.
                seed = self.stream.derive(f"shards{chosen}", worker=number, shared=True)
                self._control.replacements.replace(sampler, "seed", seed % _SAMPLER_SEED)
                continue
            generator = self._orders.get(number) or make_generator(sampler)
            if generator is None:
                continue
            self._orders[number] = generator
            # In every epoch, because another stage's loader may hold the same sampler.
            with suppress(AttributeError):  # a read-only attribute keeps its value
                self._control.replacements.replace(sampler, "generator", generator)
            shared = not self._rankless
            seed = self.stream.derive(f"order{chosen}", worker=number, shared=shared)
            generator.manual_seed(seed)
        # Workers may receive the order of epoch 0 before Lightning sets the epoch; a resumed run
        # would see that order again.
        if self.stage != "train" or (self._control.host_sets_epochs and not loader.num_workers):
            return
        inner = getattr(loader.batch_sampler, "sampler", None)
        holders: tuple[Any, ...] = (loader.sampler, inner)
        for sampler in {id(sampler): sampler for sampler in holders}.values():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                if "epoch" in getattr(sampler, "__dict__", ()):
                    if sampler.epoch == epoch:
                        continue
                    self._control.replacements.replace(sampler, "epoch", epoch)
                set_epoch(epoch)

    def _read_seed(self, sampler: Any) -> str:
        """Return what the user's own seed of a sampler adds to the names of our streams.

        Lightning gives its ``DistributedSampler`` the seed of ``PL_GLOBAL_SEED``, which is ours.
        """
        split = isinstance(sampler, DistributedSampler)
        seed = self._control.replacements.read_original(sampler, "seed" if split else "generator")
        if not split:
            seed = seed.initial_seed() if isinstance(seed, torch.Generator) else None
        defaults = (None, 0, torch.Generator().initial_seed())
        given = seed not in defaults and str(seed) != os.environ.get("PL_GLOBAL_SEED")
        return f" {seed}" if given else ""


@dataclass(eq=False)
class LoaderControl:
    """The loaders of one fit.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process. A resumed one sets it before any ``wrap_loader``.
        rank: The data-parallel rank; workers of different ranks draw different numbers.
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that its
            draws depend neither on its batch nor on the rank.
        host_sets_epochs: Whether the program that iterates the training loaders calls
            ``set_epoch`` between making an iterator and its first batch, as Lightning does.
    """

    seed: int
    _: KW_ONLY
    fit: int
    rank: int
    per_sample_rng: bool
    host_sets_epochs: bool = False

    def __post_init__(self) -> None:
        self.loaders: list[ControlledLoader] = []
        self.replacements = AttributePatches()
        self.reached: dict[str, ReachedPosition] = {}
        # Loaders that are not torch's.
        self._others: list[tuple[str, object, DataState]] = []

    def resume_epoch(
        self,
        stage: str,
        epoch: int,
        *,
        batches: int,
        cycled: Callable[[], bool],
        samplers: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue an epoch after its first batches. Call it before the epoch starts.

        Each loader has given ``batches`` of them. ``cycled`` returns whether a loader that
        ends before the epoch is iterated again; ``samplers`` is what ``capture_samplers``
        returned.
        """
        self.reached[stage] = ReachedPosition(epoch, batches, cycled, samplers or {})

    def capture_samplers(self, stage: str, *, within: bool, at_end: bool = False) -> dict[str, Any]:
        """Return what the order of batches depends on beside the random streams.

        That is what the user's samplers have changed, the states of their generators, and the
        numbers among the attributes of datasets, if they have changed.

        Args:
            stage: The stage of the loaders.
            within: True within an epoch: return the states of samplers at its start, from which its
                order was drawn.
            at_end: True if no batch of the epoch is left.

        Returns:
            Plain values.
        """
        found = {
            str(control.stream.number): control.capture(within=within, at_end=at_end)
            for control in self._list(stage)
        }
        others = [state for other, _, state in self._others if other == stage]
        found |= {f"{LOADER}{n}": state.capture() for n, state in enumerate(others)}
        return {number: states for number, states in found.items() if states}

    def _list(self, stage: str) -> list[ControlledLoader]:
        return [control for control in self.loaders if control.stage == stage]

    def wrap_loader(self, loader: Any, stage: str) -> Any:
        """Give a loader its own random streams; return the loader to iterate.

        Returns the loader itself, or a copy if another stage already controls it, so that
        validation never changes the draws of training. Returns any object that is not a
        ``DataLoader`` unchanged: only the generators of the process affect it. Call
        ``start_epoch`` before you iterate.

        Raises:
            SettingError: If per_sample_rng is on and the dataset does not have indices.
        """
        if not isinstance(loader, DataLoader):
            if is_of_program(type(loader)) and all(loader is not own for _, own, _ in self._others):
                self._others.append((stage, loader, DataState({LOADER: loader})))
            return loader
        # Do not keep loaders alive that are reloaded every epoch.
        present = [control for control in self.loaders if control.loader() is not None]
        for control in present:
            if control.loader() is loader:
                if control.stage == stage:
                    control.started = None  # it is iterated from the beginning next
                    return loader
                loader = copy_loader(loader)
                break
        self.loaders = [*present, ControlledLoader(loader, stage, self)]
        return loader

    def start_epoch(self, stage: str, epoch: int) -> None:
        """Seed the streams of a stage's loaders for an epoch.

        Does not start the same epoch twice, because its order may be drawn already.
        """
        present = self._list(stage)
        for control in present:
            if control.first_epoch is None:
                # Numbered among the loaders of the same first epoch, so that a loader that is
                # reloaded every epoch draws the same in a resumed run.
                control.stream.number = sum(other.first_epoch == epoch for other in present)
                control.first_epoch = epoch
            control.start_epoch(epoch)

    def restore_data(self, stage: str, epoch: int, *, within: bool = False) -> None:
        """Restore the state of datasets, which an iteration before the epoch may have changed."""
        for control in self._list(stage):
            control.restore_data(epoch, within=within)

    def restore_samplers(self, stage: str, samplers: Mapping[str, Any]) -> None:
        """Restore what ``capture_samplers`` returned, after the loaders were loaded."""
        for control in self._list(stage):
            control.restore(samplers)

    def keep_iterated(self, stage: str) -> None:
        """Note that a stage's loaders were iterated in advance, as ``restart_epoch`` may undo."""
        for control in self._list(stage):
            if control.start is not None:
                control.after = control.state.capture()

    def restart(self, stage: str) -> None:
        """Let the next ``start_epoch`` of a stage start the same epoch again."""
        for control in self._list(stage):
            control.started = None

    def restart_epoch(self, stage: str, epoch: int) -> None:
        """Start an epoch again, before a stage's loaders are iterated again from its beginning.

        Lightning iterates loaders when it loads them and when the epoch starts, and workers may
        already hold batches of the first time.
        """
        for control in self._list(stage):
            if control.started == epoch:
                if control.start is not None:  # but for what hooks have set
                    control.state.undo(control.start, control.after or {})
                control.started = None
        self.start_epoch(stage, epoch)

    def release(self) -> None:
        """Restore every replaced attribute in reverse order, and stop persistent workers."""
        for control in self.loaders:
            # The traceback of an error may otherwise keep them alive.
            iterator = getattr(control.loader(), "_iterator", None)
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()  # noqa: SLF001 - the only way
        self.loaders.clear()
        self.replacements.undo()


_NO_POSITION = (
    "{} does not save its position, so a resumed run would train on the same batches again. Load "
    "it with torchdata's StatefulDataLoader, or save checkpoints at the end of an epoch."
)
_NO_LENGTH = (
    "{} does not have __len__, so Lightning fetches one batch ahead, and the loader's state is one "
    "batch ahead of the training. Give it a __len__."
)
_OWN_BATCHES = (
    "{} makes its own batches in workers, whose generators cannot be saved. Set batch_size so that "
    "the loader makes them, or use num_workers=0."
)
_SKIPPED = (
    "{} does not have state_dict() and load_state_dict(), so its workers read the trained batches "
    "again to skip them, and then draw other random numbers. Give it these methods, or use "
    "num_workers=0."
)
_OWN_GENERATORS = (
    "The loader of {} draws from its own generators ({}), whose state in the loader's workers "
    "cannot be saved. Draw from the generators of Python, NumPy or torch, which are seeded for "
    "each batch."
)
_CHANGED_IN_WORKERS = (
    "{} changes {} in its workers, from which a checkpoint cannot read it. Use num_workers=0; or "
    "use persistent_workers=False, with which every epoch begins with the same values, and save "
    "checkpoints at the end of an epoch."
)
_OWN_ITERATION = (
    "The loader of {} iterates by methods of the program, so a resumed run would train on the same "
    "batches again. Let its __iter__ call that of DataLoader, or save checkpoints at the end of an "
    "epoch."
)
_EPOCH_STATE = (
    "{} has a state_dict(), which Lightning does not load between epochs, so a resumed epoch may "
    "have the order of an earlier one. Use checkpoints that are saved within an epoch, or a loader "
    "whose epochs depend only on its dataset."
)


def find_loader_problems(loader: Any, *, within: bool) -> list[str]:
    """Return why a loader cannot continue exactly, within an epoch or in the next one."""
    if not isinstance(loader, DataLoader):
        lost = within and not has_state(loader)
        return [_NO_POSITION.format(loader.__class__.__name__)] if lost else []
    dataset, workers = loader.dataset, loader.num_workers > 0
    name = dataset.__class__.__name__
    iterable = isinstance(dataset, IterableDataset)
    if within and iterable:
        tests = {
            _NO_POSITION: not has_state(loader),
            _NO_LENGTH: not hasattr(dataset, "__len__"),
            _OWN_BATCHES: workers and loader.batch_size is None,
            _SKIPPED: workers and not has_state(dataset),
        }
        if found := [problem for problem, fails in tests.items() if fails]:
            return [found[0].format(name)]
    control = find_control(loader)
    if within and control is not None and control.is_bypassed:
        return [_OWN_ITERATION.format(name)]
    # Workers that end with the epoch start the next one with a copy of this process's generators.
    if workers and (loader.persistent_workers or (within and not iterable)):
        kept = find_generators({"dataset": dataset, "collate_fn": loader.collate_fn})
        if kept:
            return [_OWN_GENERATORS.format(name, ", ".join(kept))]
        changed = "" if control is None else control.stream.changed_in_workers
        return [_CHANGED_IN_WORKERS.format(name, changed)] if changed else []
    return []


def find_control(loader: Any) -> Any:
    """Return the ``ControlledLoader`` of a loader; None without one."""
    control = loader._get_iterator.__self__  # noqa: SLF001 - the method that it replaces
    return None if control is loader else control


def find_epoch_problem(loader: Any) -> str | None:
    """Return a sentence if a loader may need its state between epochs too, else None.

    torchdata's loader does not: an epoch depends only on the dataset and on the generators.
    """
    needed = has_state(loader) and is_user_made([loader])
    return _EPOCH_STATE.format(loader.__class__.__name__) if needed else None
