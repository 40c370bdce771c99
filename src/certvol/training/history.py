"""A line of history.jsonl: what a step's losses and sigma were, in numbers and in words."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from certvol.methods.protocol import Batch

DEAD_SIGMA = 1e-3
LARGEST_SIGMA = 3.0  # times log C, which is the most that the losses ask for


def medians(batch: Batch) -> dict[str, float | None]:
    """Of what the method watches (sigma), for the rows of each domain; None for a domain without rows. Waits for the device."""
    found: dict[str, float | None] = {}
    for name, value_N in batch.watched.items():
        for domain, rows in (("source", value_N[: batch.num_source]), ("target", value_N[batch.num_source :])):
            found[f"{name}_{domain}"] = _median(rows)
    return found


def _median(rows: Tensor) -> float | None:
    return float(rows.float().median()) if len(rows) > 0 else None


def in_words(loss: float, watched: Mapping[str, float | None]) -> str:
    """Such as `loss 2.31 sigma 1.20 source 0.80 target`."""
    notes, said = [f"loss {loss:.2f}"], set()
    for key, value in watched.items():
        name, domain = key.rsplit("_", 1)
        if value is not None:
            notes.append(f"{'' if name in said else name} {value:.2f} {domain}".strip())
            said.add(name)
    return " ".join(notes)


def sigma_warnings(watched: Mapping[str, Any], num_classes: int) -> dict[str, str]:
    """By kind: where sigma no longer says anything."""
    found: dict[str, str] = {}
    for domain in ("source", "target"):
        sigma = watched.get(f"sigma_{domain}")
        if sigma is None:
            continue
        if sigma > LARGEST_SIGMA * math.log(num_classes):
            found.setdefault(
                "large sigma",
                f"sigma of the {domain} has grown to {sigma:.1f}, far above its largest target log C = "
                f"{math.log(num_classes):.1f}; a lower `training.learning_rate` may help",
            )
        if sigma < DEAD_SIGMA:
            found.setdefault(
                "sigma",
                f"sigma of the {domain} has collapsed to {sigma:.1e}, so it carries no certainty; a lower "
                "`training.learning_rate` may help",
            )
    return found
