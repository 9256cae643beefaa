"""The checks of ``d9m doctor`` for Lightning and Horovod."""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from lightning_d9m.control.doctor import CheckResult, check_variable, judge
from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.environment import PINNED_REASONS, import_horovod


def check_installation() -> Iterator[CheckResult]:
    """Check Lightning, and Horovod if it is installed."""
    yield _check_lightning()
    found = _find_version("horovod")
    if found is None:
        return
    yield _check_extension(found)
    for name, (wanted, reason) in PINNED_REASONS.items():
        yield check_variable(name, wanted, wanted.__eq__, reason, unset="the strategy sets it")
    yield _check_elastic()


def _check_lightning() -> CheckResult:
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


def _check_extension(found: str) -> CheckResult:
    try:
        import_horovod()
    except SettingError as error:
        return CheckResult(
            "Horovod",
            "problem",
            f"{found}, which cannot be imported ({error.__cause__})",
            "Its extension is missing, because `pip install horovod` can succeed without it, or it "
            "was built for a different torch.",
            "d9m install-horovod",
        )
    return CheckResult("Horovod", "ok", found)


def _check_elastic() -> CheckResult:
    name = "HOROVOD_ELASTIC"
    found = os.environ.get(name) or "not set"
    return judge(
        found not in ("not set", "0"),
        CheckResult(
            name,
            "problem",
            found,
            "Elastic Horovod changes the number of ranks while training, which changes the sums.",
            "Start with `horovodrun -np N` without --min-np and --max-np.",
        ),
    )


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
