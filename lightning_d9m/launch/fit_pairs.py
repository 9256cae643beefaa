"""Pairs of fits: which ledger of one run is the counterpart of which ledger of another.

Processes that fit in parallel (joblib, Ray, Optuna) take the numbers of their ledgers in any order,
so the content decides: seed, ordinal within the process, model, data and the initial digests. Fits
that begin alike, such as the folds of a cross-validation, are paired by how they end. Where the
initial digests differ too, seed, ordinal, model and data decide.
"""

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from itertools import count

from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Digests, Json, RunFacts

_LEVELS = 4  # keys of each fit


def pair_fits(expected: Mapping[str, Ledger], actual: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the ledgers of ``actual`` under the names of their counterparts in ``expected``.

    Ledgers whose contents match none are paired by name. A ledger without a counterpart gets a name
    that ``expected`` does not have.

    Raises:
        LedgerError: If a record is malformed or was edited.
    """
    ordinals = [{name: fit.header.fit for name, fit in fits.items()} for fits in (expected, actual)]
    if ordinals[0] == ordinals[1] and len(set(ordinals[0].values())) == len(expected):
        return dict(actual)  # one process wrote them all, in order
    keys = [
        {name: _list_keys(name, fit) for name, fit in fits.items()} for fits in (expected, actual)
    ]
    pairs: dict[str, str] = {}
    for level in range(_LEVELS):
        taken = set(pairs.values())
        waiting: dict[Hashable, list[str]] = defaultdict(list)
        for name, own in keys[1].items():
            if name not in taken:
                waiting[own[level]].append(name)
        for name, own in keys[0].items():
            if name not in pairs and (names := waiting[own[level]]):
                # Of several with the same key, one of the same name is preferred.
                pairs[name] = names.pop(names.index(name) if name in names else 0)
    paired = {name: actual[pairs[name]] for name in expected if name in pairs}
    for name in sorted(actual.keys() - set(pairs.values())):
        paired[_find_free_name(name, expected.keys() | paired.keys())] = actual[name]
    return paired


def _list_keys(name: str, ledger: Ledger) -> list[Hashable]:
    """Return the keys by which a fit finds its counterpart, the most exact first."""
    facts: list[Json] = []
    totals: list[Json] = []
    for record in ledger.line_records(min(ledger.files)):
        if isinstance(record, RunFacts):
            facts.append(record.as_record())
        elif isinstance(record, Digests):
            totals = [*totals[:1], record.totals]
    content = (json.dumps(part, sort_keys=True) for part in (facts, totals[:1], totals[-1:]))
    key = (_kind(name), ledger.header.seed, ledger.header.fit, *content)
    # Without the last digests, without the initial ones, by name alone.
    return [key, key[:-1], key[:-2], name]


def _kind(name: str) -> str:
    return name.rpartition("-")[0]


def _find_free_name(name: str, taken: Iterable[str]) -> str:
    if name not in taken:
        return name
    numbered = (f"{_kind(name)}-{number:03d}" for number in count())
    return next(found for found in numbered if found not in taken)
