"""The rules of the linter, each with its reason and fix."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "depends"]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: The id for ``--select``, ``--ignore`` and suppressions.
        name: A few words, as an identifier.
        severity: ``"error"``: runs differ with any setting; ``"warning"``: runs differ, or the run
            stops, on some devices or settings; ``"note"``: may deserve attention.
        reason: The mechanism, unless a finding has a more exact one.
        fix: The remedy, unless a finding has a more exact one.
        once: True if the rule is about a whole file and reported at most once in it.
    """

    id: str
    name: str
    severity: Severity
    reason: str
    fix: str
    once: bool = False


_SEED = "Pass a seed that is fixed and recorded."
_LISTED = "Wrap it in sorted()."

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "D9M001",
            "not-scanned",
            "error",
            "The file could not be read as Python.",
            "Repair the file, or leave it out with --exclude.",
        ),
        Rule(
            "D9M002",
            "suppression-malformed",
            "warning",
            "A suppression does not name a rule or a reason.",
            "Write `# d9m: ignore[RULE] reason` with existing rules.",
        ),
        Rule(
            "D9M003",
            "suppression-unused",
            "warning",
            "A suppression suppresses nothing.",
            "Remove it.",
        ),
        Rule(
            "D9M101",
            "op-without-deterministic-version",
            "warning",
            "torch has no deterministic version of this op.",
            "Turn patch_ops on, which replaces the op, or use a different op.",
        ),
        Rule(
            "D9M102",
            "op-silently-nondeterministic",
            "error",
            "The op varies, and torch's flag neither changes it nor raises.",
            "Turn patch_ops on, which replaces the op, or use a different op.",
        ),
        Rule(
            "D9M103",
            "op-nondeterministic-without-the-flag",
            "note",
            "The op varies while deterministic algorithms are off.",
            "Turn them on: DeterminismCallback(), Trainer(deterministic=True) or "
            "torch.use_deterministic_algorithms(True).",
        ),
        Rule(
            "D9M104",
            "package-kernel-nondeterministic",
            "error",
            "The package brings its own kernels, which torch's flag does not reach.",
            "Pass deterministic=True.",
        ),
        Rule(
            "D9M105",
            "atomic-operation-in-kernel",
            "warning",
            "Threads add to one address in no fixed order, and a floating-point sum depends on the "
            "order.",
            "Write one partial result per thread block and reduce them in a fixed order.",
        ),
        Rule(
            "D9M106",
            "kernel-chosen-by-timing",
            "warning",
            "The kernel is chosen by measured time, so another run may choose a kernel that rounds "
            "differently.",
            "Fix one configuration, or store the tuning's result in a file that all runs read.",
        ),
        Rule(
            "D9M107",
            "uninitialized-memory-read",
            "error",
            "The values are the previous content of the memory.",
            "Use torch.zeros or torch.full, or fill it before it is read.",
        ),
        Rule(
            "D9M201",
            "generator-without-seed",
            "error",
            "Without a seed the generator takes one from the system, which differs in each run; "
            "seeding the global generators does not change that.",
            _SEED,
        ),
        Rule(
            "D9M202",
            "torch-generator-never-seeded",
            "note",
            "A torch.Generator that is not seeded always starts from torch's fixed default "
            "(67280421310721): the program's seed has no effect on it.",
            "Call its manual_seed() with a seed derived from the program's.",
        ),
        Rule(
            "D9M203",
            "seed-differs-in-each-run",
            "error",
            "The seed is taken from something that differs in each run.",
            _SEED,
        ),
        Rule(
            "D9M204",
            "reseeded-from-the-system",
            "error",
            "Without an argument this takes a seed from the system, which differs in each run.",
            _SEED,
        ),
        Rule(
            "D9M205",
            "seed-by-addition",
            "note",
            "Seeds that are made by adding a rank or worker number overlap: rank 1 of seed 0 draws "
            "what rank 0 of seed 1 draws.",
            "Derive the seed by hashing, as lightning_d9m's derive_seed and NumPy's "
            "SeedSequence((seed, rank)) do.",
        ),
        Rule(
            "D9M206",
            "randomness-of-the-system",
            "error",
            "This draws from the system, which cannot be seeded.",
            "Draw from a seeded generator.",
        ),
        Rule(
            "D9M207",
            "workers-seeded-alike",
            "warning",
            "Every worker sets the same seed, so all draw the same numbers. torch seeds "
            "Python, NumPy and torch in each worker by itself.",
            "Remove the worker_init_fn, or derive its seed from torch.initial_seed().",
        ),
        Rule(
            "D9M208",
            "generator-copied-to-workers",
            "warning",
            "Each worker of a DataLoader has a copy of the dataset's generator: what a sample "
            "draws depends on the number of workers, and workers draw the same numbers.",
            "Derive a generator from the sample's index, or draw from the global generators, which "
            "torch seeds in each worker.",
        ),
        Rule(
            "D9M209",
            "ranks-workers-seeded-alike",
            "note",
            "Without workers=True the workers of all ranks draw the same numbers.",
            "Pass workers=True.",
        ),
        Rule(
            "D9M210",
            "training-without-seed",
            "warning",
            "The program trains, and neither it nor a scanned file that it imports seeds torch, "
            "so torch takes a seed from the system, which differs in each run.",
            "Add DeterminismCallback() to the Trainer, or call seed_everything() or "
            "torch.manual_seed() first, with a seed that is fixed and recorded.",
            once=True,
        ),
        Rule(
            "D9M211",
            "environment-without-seed",
            "error",
            "Without a seed in a reset() the environment takes one from the system, which differs "
            "in each run; seeding the global generators does not change that.",
            "Pass a seed that is fixed and recorded to the first reset(seed=...).",
        ),
        Rule(
            "D9M212",
            "clock-in-learning-rate",
            "error",
            "The learning rate depends on the clock, which differs in each run.",
            "Compute it from the step or the epoch.",
        ),
        Rule(
            "D9M301",
            "set-order",
            "error",
            "The order of a set of strings depends on PYTHONHASHSEED, which Python draws in each "
            "run.",
            "Iterate over sorted(...), or over dict.fromkeys(...), which keeps the order.",
        ),
        Rule(
            "D9M302",
            "listing-order",
            "error",
            "The file system determines the order; it differs on other disks and after a copy.",
            _LISTED,
        ),
        Rule(
            "D9M303",
            "hash-of-string",
            "error",
            "hash() of a string depends on PYTHONHASHSEED, which Python draws in each run.",
            "Use hashlib or zlib.crc32 on its bytes.",
        ),
        Rule(
            "D9M304",
            "hash-seed-set-too-late",
            "warning",
            "Python reads PYTHONHASHSEED when it starts: setting it here changes nothing in this "
            "process.",
            "Set it before Python starts; `d9m repeat` does.",
        ),
        Rule(
            "D9M305",
            "order-of-completion",
            "error",
            "Results come in the order in which they finish, which varies.",
            "Take them in the order in which they were submitted.",
        ),
        Rule(
            "D9M306",
            "order-of-modification-time",
            "warning",
            "The order of modification times differs after a copy or a download, and for files "
            "that several processes write.",
            "Sort by name.",
        ),
        Rule(
            "D9M307",
            "parameters-written-by-thread",
            "error",
            "A thread writes to parameters at a time that differs in each run.",
            "Write to them in the training loop or in a hook, or join the thread before training "
            "continues.",
        ),
        Rule(
            "D9M401",
            "benchmark-on",
            "warning",
            "cuDNN's benchmark chooses algorithms by measured time, so another run may choose "
            "different ones.",
            "Leave benchmark off.",
        ),
        Rule(
            "D9M402",
            "determinism-off",
            "warning",
            "Deterministic algorithms are turned off.",
            "Turn them on, without warn_only: Trainer(deterministic=True) or "
            "torch.use_deterministic_algorithms(True).",
        ),
    )
}
