"""Records for the user's loggers: the digest of the weights as text, drift as a scalar."""

from collections.abc import Iterable
from typing import Any

_WEIGHTS = "d9m/weights"
_DRIFT = "d9m/drift"


def log_digest(loggers: Iterable[Any], digest: str, step: int) -> None:
    """Log the digest of the weights as text with each logger.

    TensorBoard keeps one text for each epoch. MLflow (a tag of the run), W&B (the summary of the
    run) and CSV (a hyperparameter in hparams.yaml) keep the last. A logger of another class gets
    none: it may keep only what its last call of ``log_hyperparams`` had.
    """
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_text"):
            experiment.add_text(_WEIGHTS, digest, step)
        elif hasattr(experiment, "set_tag"):
            experiment.set_tag(logger.run_id, _WEIGHTS, digest)
        elif hasattr(experiment, "summary"):
            experiment.summary[_WEIGHTS] = digest
        elif hasattr(experiment, "log_hparams"):
            logger.log_hyperparams({_WEIGHTS: digest})


def log_drift(loggers: Iterable[Any], differing: int, step: int) -> None:
    """Log the number of entries that differ from the reference or across ranks."""
    for logger in loggers:
        logger.log_metrics({_DRIFT: float(differing)}, step=step)
