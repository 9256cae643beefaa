"""Probes that are written into a program: ``lightning_d9m.probe.monitor(x, "name")``."""

from lightning_d9m.engine.probes.dumps import find_dumps, read_dump, replay_op
from lightning_d9m.engine.probes.trace import monitor

__all__ = ["find_dumps", "monitor", "read_dump", "replay_op"]
