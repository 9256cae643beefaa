"""What ``d9m audit inference`` says."""

from collections.abc import Mapping
from typing import Any

from lightning_d9m.output.markdown import markdown_table, short

_OFFERS = {
    "fixed shape": (
        "Evaluate in batches of {size} always, the last one filled up: "
        "lightning_d9m.FixedShape(module, {size})."
    ),
    "per sample": (
        "Evaluate one sample at a time: lightning_d9m.PerSample(module), or batch_size=1."
    ),
}


def render_text(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal."""
    lines = [_say_repeatability(result), _say_invariance(result)]
    first = result["first"]
    if first is not None:
        name = first["module"] or "the model itself"
        op = f", in {first['op']}" if first["op"] else ""
        lines.append(
            f"first in {name}{op}: sample {first['sample']} in a batch of {first['size']} has "
            "other bits than alone, from equal inputs."
        )
    lines.append("")
    lines += _say_modules(result)
    lines.append("")
    for mode in result["modes"]:
        verdict = {0: "samples cannot be told apart", 1: "one output for each sample"}.get(
            mode["outputs"], f"up to {mode['outputs']} outputs for a sample"
        )
        lines.append(
            f"{mode['mode']}: {verdict}; {short(mode['microseconds'])} µs a sample in full "
            f"batches, {mode['ratio']} times; alone {mode['ratio_alone']} times"
        )
    offer = find_offer(result)
    if offer is not None:
        lines += ["", offer]
    return "\n".join(lines)


def find_offer(result: Mapping[str, Any]) -> str | None:
    """Return the cheapest mode that gives each sample one output, where the plain one does not."""
    if result["invariant"]:
        return None
    fitting = [m for m in result["modes"][1:] if m["outputs"] == 1 and m["mode"] in _OFFERS]
    if not fitting:
        return (
            "No mode gave one output for each sample: the model is not repeatable, or its outputs "
            "cannot be told apart by sample."
        )
    best = min(fitting, key=lambda mode: mode["ratio"])
    offer = _OFFERS[best["mode"]].format(size=max(result["sizes"]))
    return (
        f"{offer} It takes {best['ratio']} times as long in full batches, and "
        f"{best['ratio_alone']} times for a sample that comes alone."
    )


def render_markdown(result: Mapping[str, Any]) -> str:
    """Return the result as a page."""
    facts = ", ".join(f"{name} {result[name]}" for name in ("torch", "device", "threads"))
    rows = [
        (
            f"`{entry['name'] or '(model)'}`",
            entry["kind"],
            entry["repeatability"],
            entry["invariance"],
            ", ".join(map(str, entry["sizes"])),
        )
        for entry in result["modules"]
    ]
    modes = [
        tuple(
            map(str, (mode[k] for k in ("mode", "outputs", "microseconds", "ratio", "ratio_alone")))
        )
        for mode in result["modes"]
    ]
    parts = [
        f"# Audit of inference: {result['target']}",
        f"{facts}; {result['samples']} samples, batch sizes 1 and {result['sizes']}.",
        f"```\n{render_text(result)}\n```",
        markdown_table(("module", "class", "repeatable", "batch", "differs at sizes"), rows),
        markdown_table(
            ("mode", "most outputs of a sample", "µs a sample", "full batches", "alone"), modes
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _say_repeatability(result: Mapping[str, Any]) -> str:
    if result["repeatable"]:
        return f"repeatable: {result['runs']} evaluations of one batch gave one output."
    return (
        f"not repeatable: {result['runs']} evaluations of one batch gave {result['outputs']} "
        "outputs."
    )


def _say_invariance(result: Mapping[str, Any]) -> str:
    plain = result["modes"][0]
    if plain["outputs"] == 0:
        return "batch: unknown, for the outputs cannot be told apart by sample."
    if result["invariant"]:
        return "batch-invariant: each sample gave one output, whatever shared its batch."
    sizes = ", ".join(f"{count} at {size}" for size, count in plain["differing"].items() if count)
    return (
        f"not batch-invariant: a sample gave up to {plain['outputs']} outputs; of "
        f"{result['samples']} samples, those that differ from alone, by batch size: {sizes}."
    )


def _say_modules(result: Mapping[str, Any]) -> list[str]:
    lines, quiet = [], 0
    for entry in result["modules"]:
        if entry["repeatability"] == "repeatable" and entry["invariance"] == "invariant":
            quiet += 1
            continue
        name = entry["name"] or "(model)"
        lines.append(f"{name} ({entry['kind']}): {entry['repeatability']}, {entry['invariance']}")
    return [*lines, f"{quiet} modules are repeatable and batch-invariant."]
