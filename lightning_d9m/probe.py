"""Probes that are written into a program: ``lightning_d9m.probe.monitor(x, "name")``."""

from lightning_d9m.engine.probes.trace import monitor

__all__ = ["monitor"]
