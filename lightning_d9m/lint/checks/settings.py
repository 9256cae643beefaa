"""Settings that turn determinism off or on."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.values import UNKNOWN, Arguments, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_CUDNN = "torch.backends.cudnn."
_TRAINERS = {"lightning.Trainer"}
_OURS = {
    "lightning_d9m.DeterminismCallback",
    "lightning_d9m.enable",
    "lightning_d9m.deterministic",
    "lightning_d9m.HorovodDeterministicStrategy",
}
TURNED_ON = "turned-on"
"""Id of the note that deterministic algorithms are on; it is not a finding."""

_WARN_ONLY = (
    "With warn_only nondeterministic ops run, and attention keeps its nondeterministic kernels, "
    "after one warning."
)


def check_setting_call(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find Trainer(benchmark=True), deterministic=False and similar arguments."""
    assert isinstance(node, ast.Call)
    name = context.resolve(node.func)
    if name is None:
        return
    arguments = Arguments(node, context.scope)
    if name in _TRAINERS:
        yield from _check_trainer(node, arguments)
    elif name == "torch.use_deterministic_algorithms":
        yield from _judge_flag(
            node,
            mode=arguments.read(0, "mode", default=UNKNOWN),
            warn_only=arguments.read(None, "warn_only", default=False),
        )
    elif name == "torch.set_deterministic_debug_mode":
        mode = arguments.read(0, "debug_mode", default=UNKNOWN)
        if mode in {"warn", 1}:
            yield from _judge_flag(node, mode=True, warn_only=True)
        elif mode in {"default", 0, "error", 2}:
            yield from _judge_flag(node, mode=mode in {"error", 2}, warn_only=False)
    elif name == f"{_CUDNN}flags":
        if arguments.read(1, "benchmark", default=False) is True:
            yield ReportFinding("D9M401", node)
    elif name in _OURS or (name.startswith("lightning_d9m.") and name.endswith("Callback")):
        yield ReportFinding(TURNED_ON, node)


def check_setting(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find assignments to torch's flags."""
    assert isinstance(node, ast.Assign)
    for target in node.targets:
        if not isinstance(target, ast.Attribute):
            continue
        name = context.resolve(target) or ""
        value = read_constant(node.value, context.scope)
        if name == f"{_CUDNN}benchmark" and value is True:
            yield ReportFinding("D9M401", node)
        elif name == f"{_CUDNN}deterministic" and value is False:
            yield ReportFinding(
                "D9M402", node, reason="cuDNN may choose nondeterministic algorithms."
            )
        elif (
            name.startswith("torch._inductor.config.")
            and value is True
            and target.attr.startswith("max_autotune")
        ):
            yield ReportFinding("D9M106", node, "depends")


def _check_trainer(node: ast.Call, arguments: Arguments) -> Iterator[ReportFinding]:
    if arguments.read(None, "benchmark") is True:
        yield ReportFinding("D9M401", node)
    deterministic = arguments.read(None, "deterministic")
    if deterministic == "warn":
        yield from _judge_flag(node, mode=True, warn_only=True)
    elif isinstance(deterministic, bool):
        yield from _judge_flag(node, mode=deterministic, warn_only=False)


def _judge_flag(node: ast.Call, *, mode: object, warn_only: object) -> Iterator[ReportFinding]:
    if mode is False:
        yield ReportFinding("D9M402", node)
    elif mode is True and warn_only is True:
        yield ReportFinding(
            "D9M402", node, reason=_WARN_ONLY, fix="Remove warn_only, so that torch raises."
        )
    elif mode is True and warn_only is False:
        yield ReportFinding(TURNED_ON, node)
