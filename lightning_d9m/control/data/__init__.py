"""Seeded and resumable loaders, samplers and datasets."""
