"""The kinds of probes."""

import re

# In the order in which a batch meets them.
PROBE_KINDS = (
    "rng",
    "weight",
    "buffer",
    "optimizer",
    "batch",
    "input",
    "output",
    "op",
    "monitor",
    "loss",
    "grad_output",
    "local_gradient",
    "gradient",
    "scalar",
)
# The state that a batch starts from, and what hooks may write to.
STATE = frozenset({"rng", "weight", "buffer", "optimizer"})
WRITTEN = STATE | {"gradient"}
# The moments of the last state of a fit: where it finished, or where an exception ended it.
FINAL, EXCEPTION = ENDS = ("final", "exception")
# The moment of the state after one of the steps that follow a checkpoint.
STEP = "step"
# The group of what a saved file holds, and the beginning of its moment, which its name ends.
SAVED = "saved"
# The group of what it holds that has no digest, with the digests of the types.
UNREAD = "unread"
_VARIES = re.compile(r"[0-9a-f]{6,}|\d+")
_TEMPORARY = re.compile(r"[\w-]{8,}")  # as `tempfile` and `uuid4` make them
# The groups of runs that commit to them: SHA-256 of all batches so far, of the weights, and of the
# other state.
DATA, WEIGHTS_HASH, STATE_HASH = COMMITTED = ("data", "weights_sha256", "state_sha256")
ALL = "all"
# What the module that holds everything is called; its own name is empty.
ROOT = "(model)"
# The number of the first batch of a validation, which comes after the training batch of its step.
# One field serves for both, so that probes of a validation need no other record.
VALIDATION = 10**9

# The number of steps after a checkpoint, and after a resume, whose state is recorded.
# More than one: a generator that was not restored shows only in the step that draws from it.
FOLLOWED_STEPS = 3


def name_saved(file: str, *, is_temporary: bool = False) -> str:
    """Return the moment of a saved file; digits do not count, by which runs number and date files.

    Of a temporary name, which another takes the place of, no long part counts, which may be random.

    >>> name_saved("epoch=3.pt"), name_saved("ck.x_k2pqab.tmp", is_temporary=True)
    ('saved epoch=#.pt', 'saved ck.#.tmp')
    """
    name = _TEMPORARY.sub("#", file) if is_temporary else file
    return f"{SAVED} {_VARIES.sub('#', name)}"


def describe_batch(batch: int | None) -> str:
    """Return the number of a batch for people.

    >>> describe_batch(3), describe_batch(VALIDATION + 3)
    ('batch 3', 'batch 3 of the validation')
    """
    if batch is None or batch < VALIDATION:
        return f"batch {batch}"
    return f"batch {batch - VALIDATION} of the validation"
