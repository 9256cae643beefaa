"""Probes that are written into a program: ``lightning_d9m.probe.monitor(x, "name")``."""

from lightning_d9m.evidence.monitors import monitor

__all__ = ["monitor"]
