"""Measure how certain a model is of an image. N images, C classes.

`MEASURES` lists every measure and its direction. Before measures are compared (by correlations,
AUROC or rejection), signs are flipped so that higher means more certain, as in the paper's fig. 3c.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Measure(NamedTuple):
    """A measure's title, with the paper's symbol, and its direction."""

    title: str
    more_is_certain: bool = True
    needs_labels: bool = False
    from_logits: Callable[[Tensor], Tensor] | None = None
    """The measure of each row of logits [N, C]; None if more than logits is needed."""


def entropy(probabilities_NC: Tensor) -> Tensor:
    """Return the entropy of each row in nats; value and gradient are finite at probability 0."""
    p_NC = probabilities_NC.float()
    return (p_NC * -p_NC.clamp(min=torch.finfo(torch.float32).tiny).log()).sum(dim=1)


def _lead(logits_NC: Tensor) -> Tensor:
    first_N, second_N = logits_NC.topk(2, dim=1).values.unbind(1)
    return first_N - second_N


# Keys are the names in files and on the command line.
MEASURES = {
    "probability": Measure(
        "largest probability", from_logits=lambda logits_NC: logits_NC.softmax(dim=1).amax(dim=1)
    ),
    "entropy": Measure(
        "entropy of the probabilities",
        more_is_certain=False,
        from_logits=lambda logits_NC: entropy(logits_NC.softmax(dim=1)),
    ),
    "sigma": Measure("certainty volume (sigma)"),
    "logit": Measure("largest logit (L)", from_logits=lambda logits_NC: logits_NC.amax(dim=1)),
    "logit_gt": Measure("logit of the true class (L_GT)", needs_labels=True),
    "logit_diff": Measure("difference of the two largest logits (L_diff)", from_logits=_lead),
    "mcd_mu": Measure("mean of MC-dropout (MCD_mu)"),
    "mcd_sigma": Measure("deviation of MC-dropout (MCD_sigma)", more_is_certain=False),
}
COMPARED_WITH_SIGMA = ("logit", "logit_gt", "logit_diff", "mcd_mu", "mcd_sigma")  # the paper's five
FROM_LOGITS = tuple(name for name, measure in MEASURES.items() if measure.from_logits is not None)
LABEL_FREE = tuple(name for name, measure in MEASURES.items() if not measure.needs_labels)


def usual_measure(has_sigma: bool, frozen: bool) -> str:
    """Return the measure that finds errors best in our measurements: `--measure auto`.

    Sigma does so behind a `frozen` backbone, and the largest probability in a network that was
    trained as a whole, where sigma may be worse than chance (`docs/results/verdict.md`).
    """
    return "sigma" if has_sigma and frozen else "probability"


def logit_measures(logits_NC: Tensor, labels_N: Tensor | None = None) -> dict[str, Tensor]:
    """Return the measures that follow from logits; `logit_gt` only if there are labels."""
    logits_NC = logits_NC.float()
    functions = {name: measure.from_logits for name, measure in MEASURES.items()}
    found = {name: values(logits_NC) for name, values in functions.items() if values is not None}
    if labels_N is not None:
        found["logit_gt"] = logits_NC.gather(1, labels_N[:, None]).squeeze(1)
    return found
