"""Probe settings, traces and dumps."""
