"""The checks of ``d9m doctor`` for Lightning and Horovod."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from lightning_d9m.control.doctor import CheckResult, check_variable, judge
from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.environment import PINNED_REASONS, import_horovod


def check_installation() -> Iterator[CheckResult]:
    """Check Lightning, and Horovod if it is installed."""
    versions = {name: _find_version(name) for name in ("lightning", "pytorch-lightning")}
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield judge(
        not found,
        "Lightning",
        "note",
        found or "not installed",
        "The callback needs it; `lightning_d9m.deterministic` does not.",
        "pip install lightning",
    )
    horovod = _find_version("horovod")
    if horovod is None:
        return
    cause: object = None
    try:
        import_horovod()
    except SettingError as error:
        cause = error.__cause__
    yield judge(
        cause is not None,
        "Horovod",
        "problem",
        f"{horovod}, which cannot be imported ({cause})" if cause else horovod,
        "Its extension is missing, because `pip install horovod` can succeed without it, or it "
        "was built for a different torch.",
        "d9m install-horovod",
    )
    for name, (wanted, reason) in PINNED_REASONS.items():
        yield check_variable(name, wanted, wanted.__eq__, reason, unset="the strategy sets it")
    reason = "Elastic Horovod changes the number of ranks while training, which changes the sums."
    allows = ("", "0").__contains__
    yield check_variable("HOROVOD_ELASTIC", "0", allows, reason, unset="the number is fixed")


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
