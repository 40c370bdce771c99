"""Adaptation of feature matrices as scikit-learn estimators, on the methods, losses and batches of the command line.

Unlabelled target rows are marked by the label -1 (scikit-learn's semi-supervised convention), or given as `X_target`. The
classifiers are for the target: `predict` takes its rows to be rows of the target.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from certvol import alignment
from certvol.alignment import Array
from certvol.config import ModelConfig, TrainingConfig
from certvol.inference import Outputs, run_batches
from certvol.methods import basic, cvp
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET
from certvol.parameters import check_parameters
from certvol.seeding import torch_seed
from certvol.training.feature_views import FeatureStore, FeatureViews
from certvol.training.tensor_loop import fit_views

UNLABELLED = -1

EXPECTED_FAILED_CHECKS = {
    "check_classifiers_classes": "it fits the labels -1 and 1, and -1 marks unlabelled rows here; scikit-learn leaves that part "
    "out for its own semi-supervised estimators, by their names",
}

# The default learning rate is RATE over the mean squared length of a row, at most LARGEST_RATE. Of 1, 4 and 16, 4 was best on
# held-out source rows of two sets (31 and 10 classes, 2,048 and 64 features).
RATE, LARGEST_RATE = 4.0, 0.1
PREDICT_ROWS = 4096
LARGEST_VALUE = 1e100  # whose square, summed over any number of features, is a double
LARGEST_TRAINED = 1e15  # the same for the float32 numbers of training


class _TargetClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """What all of them share: who is source and who is target, standardisation, predictions."""

    classes_: NDArray[Any]

    def fit(self, X: Any, y: Any, X_target: Any = None) -> Self:
        """Rows of `X` with the label -1 are unlabelled target rows, as all of `X_target` are; the others are the source."""
        check_parameters(self.get_params(deep=False))
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        unlabelled_N = np.isin(y.astype(str), [str(UNLABELLED), str(float(UNLABELLED))])
        check_classification_targets(y[~unlabelled_N] if (~unlabelled_N).any() else y)
        self.classes_, labels_S = np.unique(y[~unlabelled_N], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs labelled rows of at least 2 classes, found {len(self.classes_)} class"
            )
        target_TD = X[unlabelled_N]
        if X_target is not None:
            given_TD = validate_data(self, X_target, dtype=np.float64, reset=False)
            target_TD = np.concatenate([target_TD, given_TD])
        for rows_ND in (X, target_TD):
            _check_size(rows_ND, LARGEST_VALUE, "a row given to `fit`")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # In an order that comes from their content: the target's rows in any order give the same model.
        target_TD = target_TD[np.lexsort(target_TD.T[::-1])] if len(target_TD) else target_TD
        source_SD, target_TD = self._standardised(X[~unlabelled_N], target_TD)
        self._fit(source_SD, np.asarray(labels_S, dtype=np.int64), target_TD, seed)
        return self

    def _standardised(self, source_SD: Array, target_TD: Array) -> tuple[Array, Array]:
        """Keeps mean and scale of the target, for `predict`. Without target rows, the source stands for it."""
        target = target_TD if len(target_TD) else source_SD
        if self.standardize is None:
            self.mean_, self.scale_ = np.zeros(source_SD.shape[1]), np.ones(source_SD.shape[1])
            return source_SD, target_TD
        own = target if self.standardize == "domain" else np.concatenate([source_SD, target_TD])
        self.mean_, self.scale_ = alignment.mean_and_scale(own)
        of_source = alignment.mean_and_scale(source_SD) if self.standardize == "domain" else (self.mean_, self.scale_)
        return (source_SD - of_source[0]) / of_source[1], (target_TD - self.mean_) / self.scale_

    def _rows(self, X: Any) -> Array:
        check_is_fitted(self)
        with np.errstate(over="ignore"):
            rows_ND = np.asarray((validate_data(self, X, dtype=np.float64, reset=False) - self.mean_) / self.scale_)
        _check_size(rows_ND, LARGEST_VALUE, "a row, standardised,")
        return rows_ND

    def _fit(self, source_SD: Array, labels_S: NDArray[np.int64], target_TD: Array, seed: int) -> None:
        raise NotImplementedError

    def _probabilities(self, rows_ND: Array) -> Array:
        raise NotImplementedError

    def predict_proba(self, X: Any) -> Array:
        """N x C, columns in the order of `classes_`."""
        return self._probabilities(self._rows(X))

    def predict(self, X: Any) -> NDArray[Any]:
        best_N = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best_N])


class _NetworkClassifier(_TargetClassifier):
    """Trained by gradients: pretraining on the source, then cycles of pseudo-labels, as `certvol adapt` does."""

    def _method_settings(self) -> tuple[type[AdaptationMethod], Any]:
        raise NotImplementedError

    def _method(self, dim: int, num_classes: int, seed: int) -> AdaptationMethod:
        model = ModelConfig(
            backbone=f"features-{dim}", train="head", classifier_layers=1, adapter=self.adapter, dropout=self.dropout
        )
        backbone, info = seeded_backbone(model, None, seed)
        method, settings = self._method_settings()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "heads"))
            return method(Network(backbone, info, num_classes, model), settings)

    def _fit(self, source_SD: Array, labels_S: NDArray[np.int64], target_TD: Array, seed: int) -> None:
        training = TrainingConfig(
            pretrain_steps=self.pretrain_steps,
            cycles=self.cycles,
            cycle_steps=self.cycle_steps,
            batch_size=self.batch_size,
            seed=seed,
            learning_rate=self._rate(source_SD) if self.learning_rate is None else self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        for rows_ND in (source_SD, target_TD):
            _check_size(rows_ND, LARGEST_TRAINED, "a row")
        device = torch.device(self.device)
        method = self._method(source_SD.shape[1], len(self.classes_), seed).to(device)
        stores = [
            FeatureStore(rows[:, None].astype(np.float32), np.arange(len(rows)), device, 1.0)
            for rows in (source_SD, target_TD)
        ]
        self.collapsed_ = fit_views(method, FeatureViews(*stores), labels_S, training)
        # Arrays, so that a saved estimator can be loaded where there is no GPU.
        self.weights_ = {name: tensor.detach().cpu().numpy().copy() for name, tensor in method.state_dict().items()}

    def _rate(self, source_SD: Array) -> float:
        """By the mean squared length of a row, which is what keeps steps of a linear classifier stable at any dimension."""
        return float(min(LARGEST_RATE, RATE / max(float((source_SD**2).sum(axis=1).mean()), 1e-12)))

    def _outputs(self, rows_ND: Array) -> Outputs:
        """In double precision, so that a row's prediction does not depend on the rows beside it."""
        method = self._method(rows_ND.shape[1], len(self.classes_), 0)
        method.load_state_dict({name: torch.from_numpy(array) for name, array in self.weights_.items()})
        rows = torch.from_numpy(rows_ND)

        def probabilities(features_ND: Tensor, number: int) -> Tensor:
            return method.logits(features_ND).softmax(dim=1)  # of doubles: those of far rows overflow in float32

        return run_batches(method.double().eval(), iter(torch.split(rows, PREDICT_ROWS)), TARGET, head=probabilities)

    def _probabilities(self, rows_ND: Array) -> Array:
        return np.asarray(self._outputs(rows_ND).probabilities_NC, dtype=np.float64)


class CVPClassifier(_NetworkClassifier):
    """Certainty Volume Prediction on features. Its `certainty` is sigma: wide where the model is sure.

    num_samples : M, samples of the Gaussian around each row
    samples_weight : alpha, weight of their cross-entropy
    antagonistic : whether sigma is pulled towards its target; without it sigma collapses to 0
    standardize : 'joint' (mean and variance of all rows), 'domain' (each domain by its own) or None
    adapter : whether a residual layer, started as the identity, moves the features; else f_CNN is the identity
    pretrain_steps, cycles, cycle_steps, batch_size : the two phases, as `certvol adapt` has them
    learning_rate : None for 4 over the mean squared length of a row, at most 0.1
    device : 'cpu', or a GPU's name
    random_state : seed of everything random
    """

    def __init__(
        self,
        *,
        num_samples: int = 64,
        samples_weight: float = 0.5,
        antagonistic: bool = True,
        standardize: str | None = "joint",
        adapter: bool = True,
        dropout: float = 0.0,
        pretrain_steps: int = 200,
        cycles: int = 20,
        cycle_steps: int = 20,
        batch_size: int = 128,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.num_samples = num_samples
        self.samples_weight = samples_weight
        self.antagonistic = antagonistic
        self.standardize = standardize
        self.adapter = adapter
        self.dropout = dropout
        self.pretrain_steps = pretrain_steps
        self.cycles = cycles
        self.cycle_steps = cycle_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.device = device
        self.random_state = random_state

    def _method_settings(self) -> tuple[type[AdaptationMethod], Any]:
        settings = cvp.Method.Config(
            num_samples=self.num_samples, samples_weight=self.samples_weight, antagonistic=self.antagonistic
        )
        return cvp.Method, settings

    def certainty(self, X: Any) -> Array:
        """sigma of each row: the larger, the more certain."""
        sigma_N = np.asarray(self._outputs(self._rows(X)).sigma_N, dtype=np.float64)
        if not np.isfinite(sigma_N).all():
            raise ValueError(
                "sigma of a row overflows: it lies too far from the rows of `fit`; scale the features down"
            )
        return sigma_N


class BasicClassifier(_NetworkClassifier):
    """The self-training baseline: the same network, batches and cycles as `CVPClassifier` with plain cross-entropy."""

    def __init__(
        self,
        *,
        standardize: str | None = "joint",
        adapter: bool = True,
        dropout: float = 0.0,
        pretrain_steps: int = 200,
        cycles: int = 20,
        cycle_steps: int = 20,
        batch_size: int = 128,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.standardize = standardize
        self.adapter = adapter
        self.dropout = dropout
        self.pretrain_steps = pretrain_steps
        self.cycles = cycles
        self.cycle_steps = cycle_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.device = device
        self.random_state = random_state

    def _method_settings(self) -> tuple[type[AdaptationMethod], Any]:
        return basic.Method, basic.Method.Config()


class CORALClassifier(_TargetClassifier):
    """Correlation alignment: the source gets the target's covariance, and a logistic regression is fitted on it.

    standardize : 'domain' (each domain by its own mean and variance, as in the paper), 'joint' or None
    ridge : times the identity, added to both covariances
    C : of the logistic regression
    """

    def __init__(
        self, *, ridge: float = 1.0, C: float = 1.0, standardize: str | None = "domain", random_state: Any = None
    ) -> None:
        self.ridge = ridge
        self.C = C
        self.standardize = standardize
        self.random_state = random_state

    def _fit(self, source_SD: Array, labels_S: NDArray[np.int64], target_TD: Array, seed: int) -> None:
        aligned_SD = alignment.coral(source_SD, target_TD, self.ridge) if len(target_TD) else source_SD
        self.coef_, self.intercept_ = alignment.logistic_regression(aligned_SD, labels_S, len(self.classes_), self.C)

    def _probabilities(self, rows_ND: Array) -> Array:
        logits = torch.from_numpy(rows_ND @ self.coef_.T + self.intercept_)
        return np.asarray(logits.softmax(1).numpy())


class JDAClassifier(_TargetClassifier):
    """Joint distribution adaptation: a projection in which the means of domains and classes agree, and the nearest source row.

    n_components : dimensions of the projection
    ridge : lambda, of the projection's size
    iterations : at most, each with pseudo-labels from the one before
    standardize : None (rows are scaled to unit length in any case), 'joint' or 'domain'
    """

    def __init__(
        self,
        *,
        n_components: int = 100,
        ridge: float = 1.0,
        iterations: int = 10,
        standardize: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.ridge = ridge
        self.iterations = iterations
        self.standardize = standardize
        self.random_state = random_state

    def _fit(self, source_SD: Array, labels_S: NDArray[np.int64], target_TD: Array, seed: int) -> None:
        target_TD = target_TD if len(target_TD) else source_SD
        found = alignment.jda(
            source_SD, labels_S, target_TD, len(self.classes_), self.n_components, self.ridge, self.iterations
        )
        self.projection_, self.source_, self.temperature_ = found.projection_DK, found.source_SK, found.temperature
        self.source_labels_ = labels_S

    def _probabilities(self, rows_ND: Array) -> Array:
        projected_NK = torch.from_numpy(alignment.unit_rows(alignment.unit_rows(rows_ND) @ self.projection_))
        logits = alignment.nearest_logits(
            projected_NK,
            torch.from_numpy(self.source_),
            torch.from_numpy(self.source_labels_),
            len(self.classes_),
            self.temperature_,
        )
        return np.asarray(logits.softmax(1).numpy())


def _check_size(rows_ND: Array, largest: float, what: str) -> None:
    if rows_ND.size and not np.abs(rows_ND).max() <= largest:
        found = float(np.abs(rows_ND).max())
        raise ValueError(
            f"{what} holds a value of {found:.1e}, and above {largest:.0e} numbers overflow; scale the features down"
        )
