"""Adapt feature matrices with scikit-learn estimators, which train as `certvol adapt` does.

Unlabelled target rows have the label -1, scikit-learn's convention for semi-supervised learning, or
are given as `X_target`. The classifiers are for the target: `predict` expects rows of the target.
"""

import math
import warnings
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, ClassVar, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from certvol.data.views import FeatureStore, FeatureViews
from certvol.device import pick_device
from certvol.distributed import Team
from certvol.errors import RunFailed, UserError
from certvol.methods import _alignment as alignment
from certvol.methods import basic, coral, cvp, jda
from certvol.methods._alignment import Array
from certvol.methods._base import AdaptationMethod
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET
from certvol.predict.forward import Outputs, run_batches
from certvol.randomness import torch_seed
from certvol.settings import Config, DataConfig, ModelConfig, Setting, TrainingConfig, settings_of
from certvol.training.trainer import Task, Trainer

Labels = NDArray[np.int64]
UNLABELLED = -1

EXPECTED_FAILED_CHECKS = {
    "check_classifiers_classes": "it fits the labels -1 and 1, but -1 marks unlabelled rows here; "
    "scikit-learn exempts its own semi-supervised estimators, by their names",
}

# The default learning rate is RATE over the mean squared length of a row, at most LARGEST_RATE. Of
# 1, 4 and 16, 4 was best on held-out source rows of two sets (31 and 10 classes, 2,048 and 64
# features).
RATE, LARGEST_RATE = 4.0, 0.1
PREDICT_ROWS = 4096
LARGEST_VALUE = 1e100  # its square, summed over any number of features, is still a double
LARGEST_TRAINED = 1e15  # the same for float32, in which training computes
LARGEST_INT = 2**31 - 1


def _declared(*sections: type, **renamed: str) -> dict[str, Setting]:
    """Return the settings of some sections, by the parameter's name in scikit-learn."""
    found = {each.name: each for section in reversed(sections) for each in settings_of(section)}
    return found | {name: found[setting] for name, setting in renamed.items()}


class _TargetClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Shared: which rows are source and target, standardisation, predictions."""

    classes_: NDArray[Any]
    _settings: ClassVar[dict[str, Setting]]
    """Ranges and types of parameters."""

    def _store(self, parameters: dict[str, Any]) -> None:
        """Set parameters as attributes of the same names, unchanged, as scikit-learn asks."""
        for name in self._get_param_names():
            setattr(self, name, parameters[name])

    def fit(self, X: Any, y: Any, X_target: Any = None) -> Self:
        """Fit to the labelled rows of `X` and adapt to the others (label -1) and to `X_target`."""
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        unlabelled_N = np.isin(y.astype(str), [str(UNLABELLED), str(float(UNLABELLED))])
        check_classification_targets(y[~unlabelled_N] if (~unlabelled_N).any() else y)
        self.classes_, labels_S = np.unique(y[~unlabelled_N], return_inverse=True)
        if len(self.classes_) < 2:
            needs = f"{type(self).__name__} needs labelled rows of at least 2 classes"
            raise ValueError(f"{needs}, found {len(self.classes_)} class")
        target_TD = X[unlabelled_N]
        if X_target is not None:
            given_TD = validate_data(self, X_target, dtype=np.float64, reset=False)
            target_TD = np.concatenate([target_TD, given_TD])
        for rows_ND in (X, target_TD):
            _check_size(rows_ND, LARGEST_VALUE, "a row given to `fit`")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # Sort the target by content, so that its rows give the same model in any order.
        target_TD = target_TD[np.lexsort(target_TD.T[::-1])] if len(target_TD) else target_TD
        source_SD, target_TD = self._standardised(X[~unlabelled_N], target_TD)
        self._fit(source_SD, np.asarray(labels_S, dtype=np.int64), target_TD, seed)
        return self

    def _check_parameters(self) -> None:
        """Raise ValueError for a parameter of the wrong type or out of its setting's range."""
        if self.standardize not in ("joint", "domain", None):
            raise ValueError(
                f"`standardize` should be 'joint', 'domain' or None, found {self.standardize!r}"
            )
        for name, value in self.get_params(deep=False).items():
            if name not in self._settings or (name == "learning_rate" and value is None):
                continue
            fault = _fault(self._settings[name], value)
            if fault is None and name == "device":
                try:
                    pick_device(value)
                except UserError as error:
                    fault = f"should be a usable device ({error})"
            if fault is not None:
                raise ValueError(f"`{name}` {fault}, found {value!r}")

    def _standardised(self, source_SD: Array, target_TD: Array) -> tuple[Array, Array]:
        """Standardise both domains, and keep the target's mean and scale for `predict`.

        Without target rows, the source takes their place.
        """
        target = target_TD if len(target_TD) else source_SD
        if self.standardize is None:
            self.mean_, self.scale_ = np.zeros(source_SD.shape[1]), np.ones(source_SD.shape[1])
            return source_SD, target_TD
        if self.standardize == "domain":
            self.mean_, self.scale_ = alignment.mean_and_scale(target)
            source_mean, source_scale = alignment.mean_and_scale(source_SD)
        else:
            both = np.concatenate([source_SD, target_TD])
            self.mean_, self.scale_ = alignment.mean_and_scale(both)
            source_mean, source_scale = self.mean_, self.scale_
        return (source_SD - source_mean) / source_scale, (target_TD - self.mean_) / self.scale_

    def _rows(self, X: Any) -> Array:
        check_is_fitted(self)
        rows_ND = validate_data(self, X, dtype=np.float64, reset=False)
        with np.errstate(over="ignore"):
            rows_ND = np.asarray((rows_ND - self.mean_) / self.scale_)
        _check_size(rows_ND, LARGEST_VALUE, "a row, standardised,")
        return rows_ND

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        raise NotImplementedError

    def _probabilities(self, rows_ND: Array) -> Array:
        raise NotImplementedError

    def predict_proba(self, X: Any) -> Array:
        """Return N x C probabilities, columns in the order of `classes_`."""
        return self._probabilities(self._rows(X))

    def predict(self, X: Any) -> NDArray[Any]:
        best_N = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best_N])


class _NetworkClassifier(_TargetClassifier):
    """Trained by gradients: pretraining on the source, then cycles of pseudo-labels."""

    _name: ClassVar[str]
    _method: ClassVar[type[AdaptationMethod]]

    def _config(self, dim: int, seed: int, learning_rate: float) -> Config:
        given = {**self.get_params(deep=False), "seed": seed, "learning_rate": learning_rate}
        given |= {"backbone": f"features-{dim}", "train": "head", "classifier_layers": 1}
        given["head_rate"] = 1.0  # the learning rate follows from the rows

        def filled(section: type) -> Any:
            names = [each.name for each in settings_of(section)]
            return section(**{name: given[name] for name in names if name in given})

        return Config(
            method_name=self._name,
            method=filled(self._method.Config),
            data=DataConfig(holdout=0.0),
            model=filled(ModelConfig),
            training=filled(TrainingConfig),
        )

    def _network(self, config: Config) -> AdaptationMethod:
        seed = config.training.seed
        backbone, info = seeded_backbone(config.model, None, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "heads"))
            network = Network(backbone, info, len(self.classes_), config.model)
            return self._method(network, config.method)

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        for rows_ND in (source_SD, target_TD):
            _check_size(rows_ND, LARGEST_TRAINED, "a row")
        rate = _learning_rate(source_SD) if self.learning_rate is None else self.learning_rate
        config = self._config(source_SD.shape[1], seed, rate)
        if len(target_TD) == 0:
            config = replace(config, training=replace(config.training, cycles=0))
            target_TD = source_SD  # only watched
        device = pick_device(self.device)
        method = self._network(config).to(device)
        source, target = (
            FeatureStore(rows[:, None].astype(np.float32), np.arange(len(rows)), device, 1.0)
            for rows in (source_SD, target_TD)
        )
        views, team = FeatureViews(source, target), Team()
        task = Task(config, method, views, labels_S, team, max(1, self.pretrain_steps))
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):  # the caller's random numbers stay
                trainer = Trainer(task)
                delivery = trainer.fit()
        except RunFailed:
            advice = "lower `learning_rate` or raise `batch_size`"
            raise ValueError(f"training diverged: {advice}") from None
        self.collapsed_ = bool(trainer.position.collapse)
        if self.collapsed_:
            warnings.warn(f"{delivery.why}: {delivery.model} is kept", stacklevel=3)
        # Arrays, so that a saved estimator can be loaded without a GPU.
        tensors = method.state_dict().items()
        self.weights_ = {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors}

    def _outputs(self, rows_ND: Array) -> Outputs:
        """Predict in double precision, so that a row's prediction does not depend on other rows."""
        method = self._network(self._config(rows_ND.shape[1], 0, LARGEST_RATE))
        tensors = {name: torch.from_numpy(array) for name, array in self.weights_.items()}
        method.load_state_dict(tensors)
        batches = torch.split(torch.from_numpy(rows_ND), PREDICT_ROWS)
        return run_batches(method.double().eval(), batches, TARGET)

    def _probabilities(self, rows_ND: Array) -> Array:
        return np.asarray(self._outputs(rows_ND).probabilities_NC, dtype=np.float64)


class CVPClassifier(_NetworkClassifier):
    """Certainty Volume Prediction on features; `certainty` returns sigma, large for certain rows.

    num_samples : M, samples of the Gaussian around each row
    samples_weight : alpha, weight of their cross-entropy
    antagonistic : whether sigma is pulled towards its target; without it sigma collapses to 0
    standardize : 'joint' (mean and variance of all rows), 'domain' (each domain's own) or None
    adapter : whether a residual layer, initialised to the identity, moves the features
    pretrain_steps, cycles, cycle_steps, batch_size : the two phases, as in `certvol adapt`
    learning_rate : None for 4 over the mean squared length of a row, at most 0.1
    device : 'cpu', 'cuda', 'cuda:N' or 'auto'
    random_state : seed of everything random
    """

    _name, _method = "cvp", cvp.Method
    _settings = _declared(cvp.Method.Config, ModelConfig, TrainingConfig)

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
        self._store(locals())

    def certainty(self, X: Any) -> Array:
        """Return sigma of each row: the larger, the more certain."""
        sigma_N = np.asarray(self._outputs(self._rows(X)).sigma_N, dtype=np.float64)
        if not np.isfinite(sigma_N).all():
            far = "sigma of a row overflows, because it lies too far from the rows of `fit`"
            raise ValueError(f"{far}; scale the features down")
        return sigma_N


class BasicClassifier(_NetworkClassifier):
    """The self-training baseline: `CVPClassifier` with plain cross-entropy and without sigma."""

    _name, _method = "basic", basic.Method
    _settings = _declared(basic.Method.Config, ModelConfig, TrainingConfig)

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
        self._store(locals())


class CORALClassifier(_TargetClassifier):
    """Correlation alignment: a logistic regression on the source with the target's covariance.

    standardize : 'domain' (each domain's own mean and variance, as in the paper), 'joint' or None
    ridge : multiple of the identity that is added to both covariances
    C : inverse regularisation of the logistic regression
    """

    _settings = _declared(coral.Method.Config, C="strength")

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        C: float = 1.0,
        standardize: str | None = "domain",
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        if len(target_TD):
            source_SD = alignment.coral(source_SD, target_TD, self.ridge)
        self.coef_, self.intercept_ = alignment.logistic_regression(
            source_SD, labels_S, len(self.classes_), self.C
        )

    def _probabilities(self, rows_ND: Array) -> Array:
        logits = torch.from_numpy(rows_ND @ self.coef_.T + self.intercept_)
        return np.asarray(logits.softmax(1).numpy())


class JDAClassifier(_TargetClassifier):
    """Joint distribution adaptation: project both domains, label by the nearest source row.

    In the projection, the means of the domains and of their classes agree.

    n_components : dimensions of the projection
    ridge : lambda, the regularisation of the projection
    iterations : rounds of projecting and relabelling, at most
    standardize : None (rows are scaled to unit length in any case), 'joint' or 'domain'
    """

    _settings = _declared(jda.Method.Config, n_components="components", iterations="rounds")

    def __init__(
        self,
        *,
        n_components: int = 100,
        ridge: float = 1.0,
        iterations: int = 10,
        standardize: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        fit = alignment.JDA(len(self.classes_), self.n_components, self.ridge, self.iterations).fit
        found = fit(source_SD, labels_S, target_TD if len(target_TD) else source_SD)
        self.projection_, self.source_ = found.projection_DK, found.source_SK
        self.temperature_, self.source_labels_ = found.temperature, labels_S

    def _probabilities(self, rows_ND: Array) -> Array:
        projected_NK = alignment.unit_rows(alignment.unit_rows(rows_ND) @ self.projection_)
        arrays = (projected_NK, self.source_, self.source_labels_)
        rows, source, labels = (torch.from_numpy(array) for array in arrays)
        classes = len(self.classes_)
        logits = alignment.nearest_logits(rows, source, labels, classes, self.temperature_)
        return np.asarray(logits.softmax(1).numpy())


def _fault(setting: Setting, value: Any) -> str | None:
    """Return what a value should be, in words, or None if it fits the setting."""
    kind = next(iter(get_args(setting.kind)), setting.kind)
    if kind is bool:
        return None if isinstance(value, bool | np.bool_) else "should be True or False"
    if kind is str:
        return None if isinstance(value, str) else "should be text"
    if isinstance(value, bool | np.bool_):
        value = None  # a bool is an Integral too
    if kind is int and not (isinstance(value, Integral) and abs(int(value)) <= LARGEST_INT):
        return "should be a whole number"
    if kind is float and not (isinstance(value, Real) and math.isfinite(value)):
        return "should be a finite number"
    return setting.fault(kind(value))


def _learning_rate(source_SD: Array) -> float:
    """Scale rows by their mean squared length, which keeps a linear classifier stable."""
    mean = float((source_SD**2).sum(axis=1).mean())
    return float(min(LARGEST_RATE, RATE / max(mean, 1e-12)))


def _check_size(rows_ND: Array, largest: float, what: str) -> None:
    if rows_ND.size and not np.abs(rows_ND).max() <= largest:
        found = float(np.abs(rows_ND).max())
        raise ValueError(
            f"{what} holds a value of {found:.1e}, and numbers above {largest:.0e} overflow; scale "
            "the features down"
        )
