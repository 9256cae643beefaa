"""Probes that the user places in a model: ``lightning_d9m.probe.monitor``.

A monitor does nothing while no listener is set, so it can stay in a model. Nothing here imports
torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")
Listener = Callable[[str, object], None]

_listener: Listener | None = None


def monitor(value: Value, name: str) -> Value:
    """Record a value under a name while probes of the kind ``"monitor"`` are on.

    Args:
        value: A tensor, number, string, None, any other object, or containers of these. It is
            returned unchanged, so gradients pass, and an expression can be monitored in place.
        name: The name of the place in ledgers and reports.

    Examples:
        >>> monitor(3, "three")
        3
    """
    if _listener is not None:
        _listener(name, value)
    return value


@contextmanager
def monitors_heard(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with (name, value) for each monitor, until the body ends."""
    global _listener  # noqa: PLW0603 - a monitor has no other access to the listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
