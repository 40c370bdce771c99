"""Every estimator with quick settings, and a source and a target of three classes."""

from typing import Any

import numpy as np

from certvol.sklearn import (
    AdREMClassifier,
    BasicClassifier,
    CORALClassifier,
    CVPClassifier,
    GTDAClassifier,
    JDAClassifier,
    PrDAClassifier,
    RWAClassifier,
)

CLOSED_FORM: list[type] = [
    CORALClassifier,
    JDAClassifier,
    GTDAClassifier,
    RWAClassifier,
    AdREMClassifier,
    PrDAClassifier,
]
ESTIMATORS: list[type] = [CVPClassifier, BasicClassifier, *CLOSED_FORM]
QUICK: dict[str, Any] = {
    "pretrain_steps": 40,
    "cycles": 3,
    "cycle_steps": 5,
    "batch_size": 32,
    "iterations": 9,
    "rounds": 4,
    "repetitions": 3,
    "random_state": 0,
}


def quick(cls: type, **changed: Any) -> Any:
    names = cls().get_params()
    return cls(**{name: value for name, value in {**QUICK, **changed}.items() if name in names})


def domains(
    seed: int = 0, per_class: int = 40, dim: int = 8
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make three classes; the target is shifted and stretched."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, dim)) * 2
    labels = np.repeat(np.arange(3), per_class)
    source = centres[labels] + rng.normal(size=(len(labels), dim))
    target = (centres[labels] + rng.normal(size=(len(labels), dim))) * rng.uniform(
        0.5, 1.5, dim
    ) + rng.normal(size=dim) * 2
    return source, labels, target, labels


SOURCE, LABELS, TARGET, TRUE = domains()
X = np.concatenate([SOURCE, TARGET])
Y = np.concatenate([LABELS, np.full(len(TARGET), -1)])


def states(estimator: Any) -> list[Any]:
    return [value for name, value in sorted(vars(estimator).items()) if name.endswith("_")]


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal(first[name], second[name]) for name in first
        )
    return bool(np.array_equal(first, second))
