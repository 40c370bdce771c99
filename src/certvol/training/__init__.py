"""Train in two phases, pretraining and adaptation, and save the results."""

from collections.abc import Sequence

from certvol.scores.validators import VALIDATORS
from certvol.training.optimizers import OPTIMIZERS


def named_choices() -> dict[str, Sequence[str]]:
    """Return the choices of settings whose values are names in a registry."""
    return {"guard.select": ("last", *VALIDATORS), "training.optimizer": tuple(OPTIMIZERS)}
