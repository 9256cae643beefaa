"""Compare a ledger with mutations of itself: clear errors, bounded memory, no false verdict.

Each mutation changes the records of a small run with probes. Half of them change bytes; the other
half change values, order or number of records and compute all checks again, so that only the schema
and the comparison can notice. A mutation fails if the comparison raises anything but a
``LedgerError``, takes longer than ten seconds or more memory than promised, or calls runs equal of
which an independent reader finds different contents.
"""

import json
import random
import signal
import tracemalloc
from base64 import b64decode
from collections import Counter

from ledger_runs import LedgerWriter, make_digests, make_facts, make_header

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import (
    CHAIN_START,
    End,
    Evaluation,
    chain_record,
)
from lightning_d9m.errors import LedgerError
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

SECONDS = 10
# Bytes that reading may take: the buffers, and so many times the size of the files.
BUFFERS, FACTOR = 8 * 2**20, 64
VALUES = (
    *(0, 1, -1, 2, 255, 256, 2**16, 2**31, 2**63 - 1, 2**63, 10**30),
    *(0.5, -0.0, True, False, None),
)
TEXTS = (
    *("", "a", "f" * 32, "F" * 32, "0x1.8p-1", "\x1b[31m", "\u202e", "end", "probes", "frames"),
    "x" * 5000,
)


def write_run(path, draw):
    """Write a run with probes: two layouts, batches in parts, epochs, and the end."""
    layouts = [["output", "a", 0], ["output", "b", 0], ["loss", "loss", 0]], [["op", "c", 0]]
    records = [make_header(stack={}, settings={}), make_facts(), make_digests("initial", 0)]
    for number, places in enumerate(layouts):
        records.append({"kind": "layout", "id": number, "places": places})
    step = 0
    for epoch in range(2):
        for batch in range(4):
            for number, places in enumerate(layouts):
                place = {"epoch": epoch, "step": step, "batch": batch, "layout": number}
                digests = draw.randbytes(16 * len(places))
                records.append({"kind": "probes", **place, "digests": digests})
            step += batch % 2
        values = {"loss": draw.random().hex(), "scalars": {"accuracy": draw.random().hex()}}
        records.append(make_digests("epoch", epoch, step=step, **values))
        # A validation in which a batch has no digest.
        outputs = {"outputs": draw.randbytes(16).hex(), "undigested": 1, "problem": "no digest"}
        evaluation = Evaluation(name="validate", epoch=epoch, step=step, batches=3, **outputs)
        records.append(evaluation)
    with LedgerWriter(path) as writer:
        for record in (*records, make_digests("final", 1, step=step), End(status="finished")):
            writer.write(record)


# What an independent reader finds.


def list_contents(path):
    """Return what counts in a ledger: records and digests, and the names of groups with a total.

    The first has how often each occurs. A group may be written by its total alone.
    """
    found, named, layouts = Counter(), {}, {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        record = json.loads(line)
        record.pop("check")
        match record["kind"]:
            case "layout":
                layouts[record["id"]] = [tuple(place) for place in record["places"]]
            case "probes":
                count_digests(record, layouts[record["layout"]], found)
            case "header":
                names = ("seed", "fit", "world_size", "settings")
                found[json.dumps([record.get(name) for name in names], sort_keys=True)] += 1
            case _:
                count_record(record, found, named)
    return found, named


def count_digests(record, places, found):
    """Count the digests of a record by batch and place."""
    digests, size = b64decode(record["digests"]), len(places)
    for number in range(record.get("count", 1)):
        step = record["step"] + number * record.get("steps", 1)
        batch = record["batch"] + number * record.get("batches", 1)
        for at, place in enumerate(places, number * size):
            found[record["epoch"], step, batch, place, digests[16 * at : 16 * at + 16]] += 1


def count_record(record, found, named):
    """Count a record by its contents; a field that is missing has its default."""
    record = {name: value for name, value in record.items() if value not in (None, 0, {}, [])}
    if record["kind"] == "end":
        record.pop("error", None)
        record.pop("drift", None)
    if record["kind"] == "digests":
        totals, groups = record.get("totals", {}), record.pop("groups", {})
        when = record["moment"], record.get("epoch"), record.get("step")
        for group, names in groups.items():
            if group in totals:
                named[when, group] = names
            else:
                found[when, group, repr(sorted(names.items()))] += bool(names)
    found[json.dumps(record, sort_keys=True)] += 1


def try_to_list(path):
    """Return the contents of a ledger; None if it is none."""
    try:
        return list_contents(path)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def agree(contents, others):
    """Return whether two contents are equal where both have names."""
    if contents is None or others is None:
        return False
    common = contents[1].keys() & others[1].keys()
    return +contents[0] == +others[0] and all(contents[1][key] == others[1][key] for key in common)


# Mutations.


def change_bytes(data, draw):
    """Change, remove, repeat, move or add some bytes."""
    if not data:
        return draw.randbytes(4)
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice((1, 2, 8, 38, 200)))
    part = data[start:stop]
    flipped = bytes([data[start] ^ 1 << draw.randrange(8)])
    at = draw.randrange(len(data))
    return draw.choice(
        (
            data[:start] + flipped + data[start + 1 :],
            data[:start] + draw.randbytes(len(part)) + data[stop:],
            data[:start] + data[stop:],
            data[:stop] + part + data[stop:],
            data[:start],
            (data[:start] + data[stop:])[:at] + part + (data[:start] + data[stop:])[at:],
            data[:start] + draw.randbytes(draw.randrange(40)) + data[start:],
        )
    )


def change_list(entries, draw):
    """Remove, repeat or move an entry."""
    at, to = draw.randrange(len(entries)), draw.randrange(len(entries))
    entry = entries[at]
    match draw.randrange(3):
        case 0:
            return entries[:at] + entries[at + 1 :]
        case 1:
            return [*entries[:to], entry, *entries[to:]]
        case _:
            rest = entries[:at] + entries[at + 1 :]
            return [*rest[:to], entry, *rest[to:]]


def change_value(value, draw):
    """Return a JSON value that differs somewhere."""
    within = draw.random() < 0.8
    if isinstance(value, dict) and value and within:
        return change_object(value, draw)
    if isinstance(value, list) and value and within:
        if draw.random() < 0.5:
            return change_list(value, draw)
        at = draw.randrange(len(value))
        return [*value[:at], change_value(value[at], draw), *value[at + 1 :]]
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice("0af9xp.-") + value[at + 1 :]
    return draw.choice((draw.choice(VALUES), draw.choice(TEXTS), [], {}, [[[]]], {"a": {}}))


def change_object(value, draw):
    """Remove, add or change an entry, or turn their order."""
    name = draw.choice(list(value))
    match draw.randrange(6):
        case 0:
            return {key: entry for key, entry in value.items() if key != name}
        case 1:
            return {**value, draw.choice(TEXTS): draw.choice(VALUES)}
        case 2:
            return dict(reversed(value.items()))
        case _:
            return {**value, name: change_value(value[name], draw)}


def forge(path, draw):
    """Change values, order or number of records, and compute all checks again."""
    records = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    for record in records:
        record.pop("check")
    if draw.random() < 0.3:
        records = records[:1] + change_list(records[1:], draw)
    else:
        at = draw.randrange(len(records))
        records[at] = change_value(records[at], draw)
    lines, check = [], CHAIN_START
    for record in records:
        line, check = chain_record(json.dumps(record, separators=(",", ":")).encode(), check)
        lines.append(line)
    path.write_bytes(b"".join(lines))


# The check of one mutation.


class TooLongError(Exception):
    """The comparison took too long."""


def give_up(*_):
    """Raise, as the handler of the alarm."""
    raise TooLongError


def judge(base, mutated, contents):
    """Return (outcome, what is wrong with it; empty for nothing)."""
    size = mutated.stat().st_size
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    signal.alarm(SECONDS)
    try:
        verdicts = {
            compare_ledgers(read_ledger(one), read_ledger(other)).verdict
            for one, other in ((base, mutated), (mutated, base))
        }
    except LedgerError:
        outcome, wrong = "refused", ""
    except BaseException as error:  # noqa: BLE001 - what is looked for
        return "failed", f"{type(error).__name__}: {error}"
    else:
        outcome = "/".join(sorted(verdicts))
        wrong = "the two directions disagree" if len(verdicts) > 1 else ""
    finally:
        signal.alarm(0)
    peak = tracemalloc.get_traced_memory()[1] - before
    if peak > BUFFERS + FACTOR * size:
        wrong = f"{peak} bytes of memory for {size} bytes"
    if outcome == "equal" and not agree(try_to_list(mutated), contents):
        wrong = "different contents are called equal"
    return outcome, wrong


def fuzz(count, seed, folder):
    """Return how often each outcome came, and what failed."""
    base, mutated = folder / "base.jsonl", folder / "mutated.jsonl"
    write_run(base, random.Random(seed))
    contents = list_contents(base)
    original = base.read_bytes()
    outcomes, failures = Counter(), []
    import numpy  # noqa: F401, ICN001 - its memory is not a ledger's

    signal.signal(signal.SIGALRM, give_up)
    tracemalloc.start()
    for number in range(count):
        draw = random.Random(seed * 1_000_003 + number)
        mutated.write_bytes(original)
        if number % 2:
            forge(mutated, draw)
        else:
            mutated.write_bytes(change_bytes(original, draw))
        outcome, wrong = judge(base, mutated, contents)
        outcomes["forged" if number % 2 else "bytes", outcome] += 1
        if wrong:
            failures.append({"mutation": number, "wrong": wrong})
    tracemalloc.stop()
    return outcomes, failures
