"""Pairs of fits: which ledger of one run is the counterpart of which ledger of another.

Processes that fit in parallel (joblib, Ray, Optuna) take the numbers of their ledgers in any order,
so the content decides: seed, ordinal within the process, model, data and the initial digests. Fits
that begin alike, such as the folds of a cross-validation, are paired by how they end. Where the
initial digests differ too, seed, ordinal, model and data decide.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import count

from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Digests, RunFacts


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
    pairs: dict[str, str] = {}
    # The third one leaves out the bits; without a key, names decide.
    for key in (_read_whole, _read_start, partial(_read_start, digests=False), None):
        _pair_equal(expected, actual, pairs, key)
    paired = {name: actual[pairs[name]] for name in expected if name in pairs}
    for name in sorted(actual.keys() - set(pairs.values())):
        paired[_find_free_name(name, expected.keys() | paired.keys())] = actual[name]
    return paired


def _pair_equal(
    expected: Mapping[str, Ledger],
    actual: Mapping[str, Ledger],
    pairs: dict[str, str],
    read_key: Callable[[Ledger], Hashable] | None,
) -> None:
    """Pair the remaining fits that have equal keys; by name without ``read_key``.

    Of several with the same key, one of the same name is preferred.
    """
    taken = set(pairs.values())
    waiting: dict[Hashable, list[str]] = {}
    for name in actual:
        if name not in taken:
            key = name if read_key is None else (_kind(name), read_key(actual[name]))
            waiting.setdefault(key, []).append(name)
    for name in expected:
        if name not in pairs:
            key = name if read_key is None else (_kind(name), read_key(expected[name]))
            if names := waiting.get(key):
                pairs[name] = names.pop(names.index(name) if name in names else 0)


def _kind(name: str) -> str:
    return name.rpartition("-")[0]


def _read_start(ledger: Ledger, *, digests: bool = True) -> Hashable:
    """Return the start of a fit: seed, ordinal, model, data, initial digests."""
    header = ledger.header
    content: list[object] = [header.seed, header.fit]
    for record in ledger.line_records(min(ledger.files)):
        if isinstance(record, RunFacts):
            content.append(record.as_record())
        elif isinstance(record, Digests):
            content += [record.totals] if digests else []
            break
    return json.dumps(content, sort_keys=True)


def _read_whole(ledger: Ledger) -> Hashable:
    """Return the start of a fit and its last digests."""
    last = ledger.outcome(min(ledger.files)).last
    return _read_start(ledger), None if last is None else json.dumps(last.totals, sort_keys=True)


def _find_free_name(name: str, taken: Iterable[str]) -> str:
    if name not in taken:
        return name
    numbered = (f"{_kind(name)}-{number:03d}" for number in count())
    return next(found for found in numbered if found not in taken)
