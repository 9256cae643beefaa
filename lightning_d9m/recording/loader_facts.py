"""The size of a training dataloader, as the ledger records it."""

from lightning_d9m.ledger.format.records import LoaderFacts


def describe_loader(loader: object) -> LoaderFacts:
    """Return how many samples and batches a loader has, and its batch size, where it can tell."""
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:  # a custom batch sampler, or no automatic batching
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return LoaderFacts(
        samples=_length(getattr(loader, "dataset", None)),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        batches=_length(loader),
    )


def _length(sized: object) -> int | None:
    """Return a length, or None if there is none, as for an iterable dataset."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
