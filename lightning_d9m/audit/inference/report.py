"""The report of ``d9m audit inference``."""

from collections.abc import Mapping
from typing import Any

from lightning_d9m.output.columns import Column, format_markdown_table, format_table, short
from lightning_d9m.output.terminal import WIDTH

_MODES: tuple[Column[Mapping[str, Any]], ...] = (
    Column("mode", lambda mode: str(mode["mode"])),
    Column("outputs", lambda mode: str(mode["outputs"] or "unknown")),  # the most of one sample
    Column("µs per sample", lambda mode: short(mode["microseconds"])),
    # Ratios to the mode "as it is".
    Column("time, full batches", lambda mode: str(mode["ratio"])),
    Column("time, batches of one", lambda mode: str(mode["ratio_alone"])),
)
_MODULES: tuple[Column[Mapping[str, Any]], ...] = (
    Column("module", lambda entry: f"`{entry['name'] or '(model)'}`"),
    Column("class", lambda entry: str(entry["kind"])),
    Column("repeatable", lambda entry: str(entry["repeatability"])),
    Column("batch", lambda entry: str(entry["invariance"])),
    Column("differs at sizes", lambda entry: ", ".join(map(str, entry["sizes"]))),
)
_OFFERS = {
    "fixed shape": (
        "Always evaluate batches of {size}, with the last one padded: "
        "lightning_d9m.FixedShape(module, {size})."
    ),
    "per sample": (
        "Evaluate one sample at a time: lightning_d9m.PerSample(module), or batch_size=1."
    ),
}


def render_text(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal."""
    outputs = "one output" if result["repeatable"] else f"{result['outputs']} outputs"
    word = "repeatable" if result["repeatable"] else "not repeatable"
    verdict = f"{word}: {result['runs']} evaluations of one batch gave {outputs}."
    lines = [verdict, _describe_invariance(result)]
    first = result["first"]
    if first is not None:
        name = first["module"] or "the model itself"
        op = f", in {first['op']}" if first["op"] else ""
        lines.append(
            f"first in {name}{op}: from equal inputs, the output of sample {first['sample']} in a "
            f"batch of {first['size']} differs from that of a batch of one."
        )
    lines.append("")
    lines += _describe_modules(result)
    lines.append("")
    lines += format_table(_MODES, result["modes"], WIDTH).splitlines()
    offer = find_offer(result)
    if offer is not None:
        lines += ["", offer]
    return "\n".join(lines)


def find_offer(result: Mapping[str, Any]) -> str | None:
    """Return the cheapest mode with one output for each sample, if the plain mode has several."""
    if result["invariant"]:
        return None
    fitting = [m for m in result["modes"][1:] if m["outputs"] == 1 and m["mode"] in _OFFERS]
    if not fitting:
        return (
            "No mode gave one output for each sample: the model is not repeatable, or its outputs "
            "cannot be assigned to samples."
        )
    best = min(fitting, key=lambda mode: mode["ratio"])
    offer = _OFFERS[best["mode"]].format(size=max(result["sizes"]))
    return (
        f"{offer} It takes {best['ratio']} times as long in full batches, and "
        f"{best['ratio_alone']} times for a batch of one."
    )


def render_markdown(result: Mapping[str, Any]) -> str:
    """Return the result as a page."""
    facts = ", ".join(f"{name} {result[name]}" for name in ("torch", "device", "threads"))
    parts = [
        f"# Audit of inference: {result['target']}",
        f"{facts}; {result['samples']} samples, batch sizes 1 and {result['sizes']}.",
        f"```\n{render_text(result)}\n```",
        format_markdown_table(_MODULES, result["modules"]),
        format_markdown_table(_MODES, result["modes"]),
    ]
    return "\n\n".join(parts) + "\n"


def _describe_invariance(result: Mapping[str, Any]) -> str:
    plain = result["modes"][0]
    if plain["outputs"] == 0:
        return "batch: unknown, because the outputs cannot be assigned to samples."
    if result["invariant"]:
        return "batch-invariant: each sample gave one output in every batch."
    sizes = ", ".join(f"{count} at {size}" for size, count in plain["differing"].items() if count)
    return (
        f"not batch-invariant: a sample gave up to {plain['outputs']} outputs; samples of "
        f"{result['samples']} that differ from their batch of one, by batch size: {sizes}."
    )


def _describe_modules(result: Mapping[str, Any]) -> list[str]:
    lines, quiet = [], 0
    for entry in result["modules"]:
        if entry["repeatability"] == "repeatable" and entry["invariance"] == "invariant":
            quiet += 1
            continue
        name = entry["name"] or "(model)"
        lines.append(f"{name} ({entry['kind']}): {entry['repeatability']}, {entry['invariance']}")
    return [*lines, f"{quiet} modules are repeatable and batch-invariant."]
