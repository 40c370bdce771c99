"""Estimators trained by gradients, as `certvol adapt` trains."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from certvol.data.reviewed import reviewed_labels
from certvol.data.store import Store
from certvol.data.target_prior import prior_of
from certvol.data.views import FeatureViews
from certvol.device import pick_device
from certvol.distributed import Team
from certvol.errors import RunFailed
from certvol.methods import basic, cvp
from certvol.methods._base import AdaptationMethod
from certvol.methods._closed_form import Array
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET
from certvol.predict.forward import Outputs, run_batches
from certvol.randomness import torch_seed
from certvol.settings import Config, DataConfig, ModelConfig, TrainingConfig, settings_of
from certvol.sklearn._rows import Rows, TargetClassifier, check_size, declared
from certvol.training.pseudo_labels import discover
from certvol.training.trainer import Task, Trainer

# The default learning rate is RATE over the mean squared length of a row, at most LARGEST_RATE. Of
# 1, 4 and 16, 4 was best on held-out source rows of two sets (31 and 10 classes, 2,048 and 64
# features).
RATE, LARGEST_RATE = 4.0, 0.1
PREDICT_ROWS = 4096
SETTLED = 0.005  # training ends early once labels by a rule that compares rows hardly change
LARGEST_TRAINED = 1e15  # the sum of squares still fits into float32, in which training computes


@dataclass(kw_only=True, eq=False, repr=False)
class _NetworkClassifier(TargetClassifier):
    """An estimator trained by gradients: pretraining, then cycles of pseudo-labels."""

    _name: ClassVar[str]
    _method: ClassVar[type[AdaptationMethod]]

    standardize: str | None = "joint"
    adapter: bool = True
    dropout: float = 0.0
    pretrain_steps: int = 200
    cycles: int = 20
    cycle_steps: int = 20
    batch_size: int = 128
    learning_rate: float | None = None
    pseudo_labels: str = "cluster"
    momentum: float = 0.9
    weight_decay: float = 0.0
    reviewed_share: float = 0.25
    target_prior: Any = "unknown"
    device: str = "cpu"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        rules = discover()
        if self.pseudo_labels not in rules:
            known = ", ".join(map(repr, rules))
            raise ValueError(
                f"`pseudo_labels` should be one of {known}, found {self.pseudo_labels!r}"
            )

    def _config(self, dim: int, seed: int, learning_rate: float) -> Config:
        given = {**self.get_params(deep=False), "seed": seed, "learning_rate": learning_rate}
        given |= {"backbone": f"features-{dim}", "train": "head", "classifier_layers": 1}
        given["head_rate"] = 1.0  # the learning rate follows from the rows
        compares_rows = discover()[self.pseudo_labels].labels_whole_target
        given["settled"] = SETTLED if compares_rows else 0.0

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

    def _fit_rows(self, rows: Rows, seed: int) -> None:
        source_SD, labels_S, target_TD = rows.source_SD, rows.labels_S, rows.target_TD
        for rows_ND in (source_SD, target_TD):
            check_size(rows_ND, LARGEST_TRAINED, "a row")
        rate = _learning_rate(source_SD) if self.learning_rate is None else self.learning_rate
        config = self._config(source_SD.shape[1], seed, rate)
        if len(target_TD) == 0:
            config = replace(config, training=replace(config.training, cycles=0))
            target_TD = source_SD  # only watched
        device = pick_device(self.device)
        method = self._network(config).to(device)
        source, target = (
            Store(rows[:, None].astype(np.float32), np.arange(len(rows)), device, 1.0)
            for rows in (source_SD, target_TD)
        )
        views = FeatureViews(source, target)
        prior = prior_of(self.target_prior, self.classes_.tolist(), labels_S)
        reviewed = reviewed_labels(rows.known_T, np.empty(0, np.int64))
        steps = max(1, self.pretrain_steps)
        task = Task(config, method, views, labels_S, prior, Team(), steps, reviewed)
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):  # leaves the caller's random numbers alone
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


@dataclass(kw_only=True, eq=False, repr=False)
class CVPClassifier(_NetworkClassifier):
    """Certainty Volume Prediction on features; `certainty` returns sigma, large if certain.

    - `num_samples`: M, samples of the Gaussian around each row
    - `samples_weight`: alpha, weight of their cross-entropy
    - `antagonistic`: whether sigma is pulled towards its target; without it sigma collapses to 0
    - `standardize`: 'joint' (mean and variance of all rows), 'domain' (each domain's own) or None
    - `adapter`: whether a residual layer, initialised to the identity, moves the features
    - `pretrain_steps`, `cycles`, `cycle_steps`, `batch_size`: both phases, as in `certvol adapt`
    - `learning_rate`: None for 4 over the mean squared length of a row, at most 0.1
    - `pseudo_labels`: the rule that labels the target: 'argmax' (by the classifier), 'cluster',
        'lame' or 'propagate' (these compare rows with each other), or 'mc_dropout' (by the
        classifier, averaged over passes with dropout)
    - `reviewed_share`: share of labelled target rows in each step of adaptation, if there are any
    - `target_prior`: how often each class occurs in the target: 'unknown', 'balanced', 'source' (as
        among the source rows) or a dict of class and share, which leaves absent classes out
    - `device`: 'cpu', 'cuda', 'cuda:N' or 'auto'
    - `random_state`: seed of everything random
    """

    _name, _method = "cvp", cvp.Method
    _settings = declared(cvp.Method.Config, ModelConfig, TrainingConfig)

    num_samples: int = 64
    samples_weight: float = 0.5
    antagonistic: bool = True

    def certainty(self, X: Any) -> Array:
        """Return sigma of each row; larger means more certain."""
        sigma_N = np.asarray(self._outputs(self._rows(X)).sigma_N, dtype=np.float64)
        if not np.isfinite(sigma_N).all():
            far = "sigma of a row overflows, because it lies too far from the rows of `fit`"
            raise ValueError(f"{far}; scale the features down")
        return sigma_N


class BasicClassifier(_NetworkClassifier):
    """The self-training baseline: `CVPClassifier` with plain cross-entropy and without sigma."""

    _name, _method = "basic", basic.Method
    _settings = declared(basic.Method.Config, ModelConfig, TrainingConfig)


def _learning_rate(source_SD: Array) -> float:
    """Scale rows by their mean squared length, which keeps a linear classifier stable."""
    mean = float((source_SD**2).sum(axis=1).mean())
    return float(min(LARGEST_RATE, RATE / max(mean, 1e-12)))
