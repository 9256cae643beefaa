"""Settings that turn determinism off or on, and kernels that are chosen by measured time."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.tree import UNKNOWN, Call, Report, Tree, read_constant, resolve

_CUDNN = "torch.backends.cudnn."
_OURS = {
    f"lightning_d9m.{name}"
    for name in ("DeterminismCallback", "enable", "deterministic", "HorovodDeterministicStrategy")
}
TURNED_ON = "turned-on"
"""Id of the note that deterministic algorithms are on; it is not a finding."""

_WARN_ONLY = (
    "With warn_only nondeterministic ops run, and attention keeps its nondeterministic kernels, "
    "after one warning."
)


def check_setting_call(call: Call) -> Iterator[Report]:
    """Find Trainer(benchmark=True), deterministic=False and similar arguments."""
    mode: object = UNKNOWN
    warn_only: object = False
    if call.name == "lightning.Trainer":
        mode = call.read(None, "deterministic", default=UNKNOWN)
        if call.read(None, "benchmark") is True:
            yield Report("D9M401", call.node)
    elif call.name == "torch.use_deterministic_algorithms":
        mode = call.read(0, "mode", default=UNKNOWN)
        warn_only = call.read(None, "warn_only", default=False)
    elif call.name == "torch.set_deterministic_debug_mode":
        given = call.read(0, "debug_mode", default=UNKNOWN)
        modes = {"default": False, 0: False, "warn": "warn", 1: "warn", "error": True, 2: True}
        mode = modes.get(given, UNKNOWN) if isinstance(given, (str, int)) else UNKNOWN
    elif call.name == f"{_CUDNN}flags" and call.read(1, "benchmark") is True:
        yield Report("D9M401", call.node)
    elif call.name in _OURS or (
        call.name.startswith("lightning_d9m.") and call.name.endswith("Callback")
    ):
        mode = True
    if mode is False:
        yield Report("D9M402", call.node)
    elif mode == "warn" or (mode is True and warn_only is True):
        fix = "Remove warn_only, so that torch raises."
        yield Report("D9M402", call.node, reason=_WARN_ONLY, fix=fix)
    elif mode is True and warn_only is False:
        yield Report(TURNED_ON, call.node)


def check_setting(node: ast.Assign, tree: Tree) -> Iterator[Report]:
    """Find assignments to torch's flags."""
    value = read_constant(node.value, tree.scope[node])
    for target in node.targets:
        name = resolve(target, tree.scope[node]) if isinstance(target, ast.Attribute) else ""
        if name == f"{_CUDNN}benchmark" and value is True:
            yield Report("D9M401", node)
        elif name == f"{_CUDNN}deterministic" and value is False:
            yield Report("D9M402", node, reason="cuDNN may choose nondeterministic algorithms.")
        elif name.startswith("torch._inductor.config.max_autotune") and value is True:
            yield Report("D9M106", node, "depends")


def check_choice_by_time(call: Call) -> Iterator[Report]:
    """Find ``triton.autotune`` over several configurations, and ``torch.compile`` that tunes."""
    if call.name == "triton.autotune":
        match call.get(0, "configs"):
            case ast.List([one]) if not isinstance(one, ast.Starred):
                pass
            case given:
                known = isinstance(given, ast.List)
                yield Report("D9M106", call.node, "certain" if known else "depends")
    elif call.name == "torch.compile" and str(call.read(None, "mode")).startswith("max-autotune"):
        yield Report("D9M106", call.node, "depends")
