"""Places of the user's own choosing: ``lightning_d9m.probe.monitor``. Nothing here imports torch.

A monitor does nothing until somebody listens, so that it can stay in a model for good.
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
        value: Anything: a tensor, a number, a text, None, or containers of such. It is returned as
            it is, so gradients pass, and an expression can be monitored in place.
        name: What ledgers and reports call the place.

    >>> monitor(3, "three")
    3
    """
    if _listener is not None:
        _listener(name, value)
    return value


@contextmanager
def monitors_heard(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with (name, value) for each monitor, until the body ends."""
    global _listener  # noqa: PLW0603 - a monitor has nothing else to ask
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
