"""Base of methods in closed form: pretrain as the baseline, then fit a head in one call.

Fits take and return numpy arrays in float64; predictions use torch tensors. N, S and T rows (any,
source, target), D features, C classes. The estimators of `certvol.sklearn` call the same fits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.methods import basic
from certvol.nn.heads import Drop
from certvol.nn.network import Network
from certvol.randomness import numpy_generator

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Fitted = dict[str, Any]
"""Fitted arrays and numbers by name."""
SMALLEST_SCALE = 1e-12
ABSENT = -1e4  # logit of a class without source rows
ROWS_AT_ONCE = 4096  # for distances to all source rows


class Problem(NamedTuple):
    """Labelled rows of the source and unlabelled ones of the target."""

    source_SD: Array
    labels_S: Labels
    target_TD: Array
    num_classes: int

    @property
    def target_or_source_TD(self) -> Array:
        """The target's rows; the source's if there are none."""
        return self.target_TD if len(self.target_TD) else self.source_SD


def mean_and_scale(features_ND: Array) -> tuple[Array, Array]:
    """Return each feature's mean and standard deviation; 1 for a constant feature."""
    scale_D = features_ND.std(axis=0)
    return features_ND.mean(axis=0), np.where(scale_D > SMALLEST_SCALE, scale_D, 1.0)


def logistic_regression(
    features_ND: Array, labels_N: Labels, num_classes: int, strength: float
) -> tuple[Array, Array]:
    """Fit a multinomial logistic regression; return W (C x D) and b (C).

    `strength` is the weight of the data against the L2 penalty.
    """
    from sklearn.linear_model import LogisticRegression

    if len(classes := np.unique(labels_N)) == 1:  # the only answer
        return np.zeros((num_classes, features_ND.shape[1])), np.where(
            np.arange(num_classes) == classes[0], 0.0, ABSENT
        )
    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-4).fit(features_ND, labels_N)
    coef, intercept = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # one row, for the second class against the first
        coef = np.concatenate([np.zeros_like(coef), coef])
        intercept = np.concatenate([[0.0], intercept])
    weight_CD = np.zeros((num_classes, features_ND.shape[1]))
    bias_C = np.full(num_classes, ABSENT)
    weight_CD[model.classes_], bias_C[model.classes_] = coef, intercept
    return weight_CD, bias_C


def row_distances(rows_ND: Tensor, others_MD: Tensor) -> Tensor:
    """Return distances, computed in float64.

    With matrix products in float32 or TF32, a row of 2,048 features is not at distance 0 from
    itself.
    """
    pair = (rows_ND.double(), others_MD.double())
    return torch.cdist(*pair, compute_mode="use_mm_for_euclid_dist").to(rows_ND.dtype)


def row_parts(rows_ND: Tensor) -> Sequence[Tensor]:
    """Split rows to bound memory, but not in an exported graph, whose number of rows is open."""
    return [rows_ND] if torch.compiler.is_compiling() else torch.split(rows_ND, ROWS_AT_ONCE)


class ClosedFormMethod(basic.Method):
    """A method that fits a head to the features of both domains.

    Keeps what it fits in buffers, which are empty before the fit and resized on loading.
    Pretraining trains f_Cl, whose predictions are the run's source-only figure.
    """

    closed_form = True
    arrays: tuple[str, ...]
    """Names of the fitted arrays, besides the mean and scale of the target's features."""
    mean_D: Tensor
    scale_D: Tensor

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        for name in ("mean_D", "scale_D", *self.arrays):
            self.register_buffer(name, torch.empty(0))
        self.seed = int(torch.randint(2**31 - 1, ()))
        """Seed of what the fit draws; it follows from the run's, as initial weights do."""

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Fit to scaled rows; return what `arrays` names.

        `config` is the method's `Config`, and `draws` the source of randomness. The estimators of
        `certvol.sklearn` call this too.
        """
        raise NotImplementedError

    @staticmethod
    def moments(source_SD: Array, target_TD: Array) -> list[tuple[Array, Array]]:
        """Return the mean and scale of the source's features, and those of the target's."""
        return [mean_and_scale(source_SD), mean_and_scale(target_TD)]

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        both = [rows.double().numpy() for rows in (source_SD, target_TD)]
        moments = self.moments(*both)
        source, target = (
            (rows - mean) / scale for rows, (mean, scale) in zip(both, moments, strict=True)
        )
        problem = Problem(source, labels_S.numpy(), target, self.network.num_classes)
        name = type(self).__module__.rpartition(".")[2]
        draws = numpy_generator(self.seed, name)
        mean_D, scale_D = moments[1]
        self.keep(mean_D=mean_D, scale_D=scale_D, **self.fit(problem, self.config, draws))

    def keep(self, **arrays: Any) -> None:
        """Store what was fitted, floats as float32 and integers unchanged."""
        device = next(self.network.classifier.parameters()).device
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            setattr(self, name, tensor.to(device))

    def logits(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        if len(self.mean_D) == 0:  # before the fit
            return super().logits(features_ND, drop)
        with torch.autocast(features_ND.device.type, enabled=False):
            return self.fitted_logits((features_ND.float() - self.mean_D) / self.scale_D)

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        """Return the logits of standardised features."""
        raise NotImplementedError

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *others: Any
    ) -> None:
        for name in ("mean_D", "scale_D", *self.arrays):
            if (found := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(found, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *others)


class LinearMethod(ClosedFormMethod):
    """A method that fits a logistic regression to standardised features."""

    keeps_source_shares = True
    arrays: tuple[str, ...] = ("weight_CD", "bias_C")
    weight_CD: Tensor
    bias_C: Tensor

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        return rows_ND @ self.weight_CD.T + self.bias_C
