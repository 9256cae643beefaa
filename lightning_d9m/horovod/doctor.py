"""What ``d9m doctor`` finds of Lightning and Horovod as they are installed and set here."""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from lightning_d9m.control.doctor import CheckResult, judge_variable
from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.environment import PINNED, import_horovod

# What another value than the pinned one does.
_REASONS = {
    "HOROVOD_FUSION_THRESHOLD": (
        "Tensor fusion packs whichever gradients are ready, so sums change their order."
    ),
    "HOROVOD_DISABLE_GROUP_FUSION": "Groups are fused with whatever else is ready otherwise.",
    "HOROVOD_AUTOTUNE": "Autotuning changes the fusion by timing it.",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "It sums within each host first, in another order.",
    "HOROVOD_TORUS_ALLREDUCE": "It sums in two dimensions, in another order.",
}


def look_at_installation() -> Iterator[CheckResult]:
    """Yield what was found; Horovod is left out where it is not installed."""
    yield _look_at_lightning()
    found = _find_version("horovod")
    if found is None:
        return
    yield _look_at_extension(found)
    for name, wanted in PINNED.items():
        yield judge_variable(name, (wanted,), _REASONS[name], unset="the strategy sets it")
    yield _look_at_elastic()


def _look_at_lightning() -> CheckResult:
    versions = {name: _find_version(name) for name in ("lightning", "pytorch-lightning")}
    found = [f"{name} {number}" for name, number in versions.items() if number is not None]
    if found:
        return CheckResult("Lightning", "ok", ", ".join(found))
    return CheckResult(
        "Lightning",
        "note",
        "not installed",
        "The callback needs it; `lightning_d9m.deterministic` does not.",
        "pip install lightning",
    )


def _look_at_extension(found: str) -> CheckResult:
    try:
        import_horovod()
    except SettingError as error:
        return CheckResult(
            "Horovod",
            "problem",
            f"{found}, which cannot be imported ({error.__cause__})",
            "Its extension is missing, as `pip install horovod` may leave it without a word, or it "
            "was built for another torch.",
            "d9m install-horovod",
        )
    return CheckResult("Horovod", "ok", found)


def _look_at_elastic() -> CheckResult:
    name = "HOROVOD_ELASTIC"
    found = os.environ.get(name, "")
    if found in ("", "0"):
        return CheckResult(name, "ok", found or "not set")
    return CheckResult(
        name,
        "problem",
        found,
        "Elastic Horovod changes the number of ranks while training, which changes the sums.",
        "Start with `horovodrun -np N` without --min-np and --max-np.",
    )


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
