"""How certain a model is of an image: the measures, from tensors. N images, D features, C classes, P passes of MC-dropout.

`MEASURES` names all of them and says which way each points. Everything that compares measures (correlations, spotting errors,
rejection) first turns them by `certainty`, so that more is more certain for every one, as in the paper's figure 3c.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]


class Measure(NamedTuple):
    title: str
    """In words, with the paper's symbol."""
    more_is_certain: bool = True
    """False: the smaller, the more certain."""
    needs_labels: bool = False


# By the name that files and the command line use.
MEASURES = {
    "probability": Measure("largest probability"),
    "entropy": Measure("entropy of the probabilities", more_is_certain=False),
    "sigma": Measure("certainty volume (sigma)"),
    "logit": Measure("largest logit (L)"),
    "logit_gt": Measure("logit of the true class (L_GT)", needs_labels=True),
    "logit_diff": Measure("difference of the two largest logits (L_diff)"),
    "mcd_mu": Measure("mean of MC-dropout (MCD_mu)"),
    "mcd_sigma": Measure("deviation of MC-dropout (MCD_sigma)", more_is_certain=False),
}
COMPARED_WITH_SIGMA = ("logit", "logit_gt", "logit_diff", "mcd_mu", "mcd_sigma")  # the paper's five
LABEL_FREE = tuple(name for name, measure in MEASURES.items() if not measure.needs_labels)


def top_logit(logits_NC: Tensor) -> Tensor:
    """L: the largest logit."""
    return logits_NC.float().amax(dim=1)


def true_logit(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """L_GT: the logit of the true class."""
    return logits_NC.float().gather(1, labels_N[:, None]).squeeze(1)


def top_two_difference(logits_NC: Tensor) -> Tensor:
    """L_diff: the largest logit minus the second."""
    first_N, second_N = logits_NC.float().topk(2, dim=1).values.unbind(1)
    return first_N - second_N


def top_probability(logits_NC: Tensor) -> Tensor:
    return logits_NC.float().softmax(dim=1).amax(dim=1)


def entropy(logits_NC: Tensor) -> Tensor:
    """Of the softmax, in nats: 0 for a sure class, log C for none."""
    log_probabilities_NC = logits_NC.float().log_softmax(dim=1)
    # A probability of 0 has a logarithm that may be -inf, and 0 * -inf is not 0.
    return (log_probabilities_NC.exp() * -log_probabilities_NC.clamp_min(-1e4)).sum(dim=1).abs()


class Masks(NamedTuple):
    """What each pass of MC-dropout keeps, scaled: input of the classifier's first and, where there are two, second layer."""

    inputs_PD: Tensor
    hidden_PD: Tensor | None


def dropout_masks(layers: Layers, passes: int, dropout: float, seed: int) -> Masks:
    """Drawn once, on the CPU: an image then gets the same figures in any batch, in any order, on any device.

    All images share the masks of a pass. For one image they are what dropout draws; between two images they are no source of
    difference.
    """
    if passes < 1 or not 0 <= dropout < 1:
        raise ValueError(
            f"MC-dropout takes at least one pass and a probability from 0 to below 1, not {passes}, {dropout}."
        )
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return (torch.rand(passes, width, generator=generator) >= dropout).float() / (1 - dropout)

    device = layers[0][0].device
    drawn = [draw(weight.shape[1]).to(device) for weight, _ in layers]
    return Masks(drawn[0], drawn[1] if len(drawn) > 1 else None)


class MCDropout(NamedTuple):
    mean_N: Tensor  # MCD_mu: mean probability, over the passes, of the class for which it is largest
    deviation_N: Tensor  # MCD_sigma: standard deviation of that class's probability over the passes


def mc_dropout(features_ND: Tensor, layers: Layers, masks: Masks) -> MCDropout:
    """The classifier many times on features that the backbone gave once.

    `layers`: weight and bias of each linear layer in order: one, or two with a ReLU between. Memory is that of one pass,
    however many there are.
    """
    return mean_and_deviation(_passes(features_ND, layers, masks))


def mean_and_deviation(passes: Iterable[Tensor]) -> MCDropout:
    """Over passes of N x C probabilities in float64, one at a time: of the class whose mean is largest."""
    count, sum_NC, squares_NC = 0, torch.zeros(()), torch.zeros(())
    for probabilities_NC in passes:
        sum_NC = probabilities_NC if count == 0 else sum_NC + probabilities_NC
        squares_NC = probabilities_NC.square() if count == 0 else squares_NC + probabilities_NC.square()
        count += 1
    mean_NC = sum_NC / count
    mean_N, winner_N = mean_NC.max(dim=1)
    square_N = (squares_NC / count).gather(1, winner_N[:, None]).squeeze(1)
    # In float64: the difference of two close numbers would be rounding in float32.
    deviation_N = (square_N - mean_N.square()).clamp_min(0).sqrt()
    return MCDropout(mean_N.float(), deviation_N.float())


def _passes(features_ND: Tensor, layers: Layers, masks: Masks) -> Iterator[Tensor]:
    """Probabilities of each pass."""
    features_ND = features_ND.float()
    (weight, bias), *rest = [(weight.float(), bias.float()) for weight, bias in layers]
    for number, inputs_D in enumerate(masks.inputs_PD):
        out = F.linear(features_ND * inputs_D, weight, bias)
        if rest and masks.hidden_PD is not None:
            out = F.linear(out.relu_() * masks.hidden_PD[number], *rest[0])
        yield out.double().softmax(dim=1)
