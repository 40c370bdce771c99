"""The base of all estimators: source and target rows, scales, checks of parameters."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Self, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from certvol.device import pick_device
from certvol.errors import UserError
from certvol.methods._closed_form import Array, mean_and_scale
from certvol.settings import Setting, settings_of

Labels = NDArray[np.int64]
Flags = NDArray[np.bool_]
UNLABELLED = -1
LARGEST_VALUE = 1e100  # the sum of squares over any number of features still fits into a double
LARGEST_INT = 2**31 - 1


def declared(*sections: type, **renamed: str) -> dict[str, Setting]:
    """Return the settings of some sections, by the parameter's name in scikit-learn."""
    found = {each.name: each for section in reversed(sections) for each in settings_of(section)}
    return found | {name: found[setting] for name, setting in renamed.items()}


@dataclass(frozen=True, eq=False)
class Rows:
    """Standardised rows of both domains, with their labels by number."""

    source_SD: Array
    labels_S: Labels
    target_TD: Array
    known_T: Labels
    """-1 for an unlabelled row."""


@dataclass(kw_only=True, eq=False, repr=False)
class TargetClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The base of the estimators: separates the domains, standardises, predicts.

    Parameters are fields of dataclasses, which are stored unchanged, as scikit-learn requires.
    """

    _settings: ClassVar[dict[str, Setting]]
    """Ranges and types of parameters."""
    classes_: NDArray[Any] = field(init=False)

    standardize: str | None = None
    random_state: Any = None

    def fit(self, X: Any, y: Any, X_target: Any = None, domain: Any = None) -> Self:
        """Fit to the labelled rows of `X` and adapt to the others (label -1) and to `X_target`.

        `domain` says which rows of `X` belong to the target (1) and which to the source (0). Target
        rows may then have labels too, such as those of reviewed images, and these train.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        if y.dtype == object and any(value is None for value in y):
            raise ValueError("a label is None; mark unlabelled rows by -1")
        unlabelled_N = np.isin(y.astype(str), [str(UNLABELLED), str(float(UNLABELLED))])
        check_classification_targets(y[~unlabelled_N] if (~unlabelled_N).any() else y)
        is_target_N = unlabelled_N if domain is None else _target_rows(domain, unlabelled_N)
        self.classes_, labels_S = np.unique(y[~is_target_N], return_inverse=True)
        if len(self.classes_) < 2:
            needs = f"{type(self).__name__} needs labelled rows of at least 2 classes"
            raise ValueError(f"{needs}, found {len(self.classes_)} class")
        target_TD, known_T = X[is_target_N], self._known(y, unlabelled_N, is_target_N)
        if X_target is not None:
            given_TD = validate_data(self, X_target, dtype=np.float64, reset=False)
            target_TD = np.concatenate([target_TD, given_TD])
            known_T = np.concatenate([known_T, np.full(len(given_TD), UNLABELLED)])
        for rows_ND in (X, target_TD):
            check_size(rows_ND, LARGEST_VALUE, "a row given to `fit`")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # Sort the target by content, so that its rows give the same model in any order.
        order_T = np.lexsort((known_T, *target_TD.T[::-1]))
        target_TD, known_T = target_TD[order_T], known_T[order_T]
        source_SD, target_TD = self._standardised(X[~is_target_N], target_TD)
        rows = Rows(source_SD, np.asarray(labels_S, dtype=np.int64), target_TD, known_T)
        self._fit_rows(rows, seed)
        return self

    def _known(self, y: NDArray[Any], unlabelled_N: Flags, is_target_N: Flags) -> Labels:
        """Return the number of the class of each target row of `X`, or -1."""
        known_N = np.full(len(y), UNLABELLED, np.int64)
        labelled_N = is_target_N & ~unlabelled_N
        foreign = np.setdiff1d(y[labelled_N], self.classes_)
        if len(foreign):
            raise ValueError(
                f"a target row has the label {foreign[0]!r}, which no source row has; give it -1"
            )
        known_N[labelled_N] = np.searchsorted(self.classes_, y[labelled_N])
        return known_N[is_target_N]

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
            self.mean_, self.scale_ = mean_and_scale(target)
            source_mean, source_scale = mean_and_scale(source_SD)
        else:
            both = np.concatenate([source_SD, target_TD])
            self.mean_, self.scale_ = mean_and_scale(both)
            source_mean, source_scale = self.mean_, self.scale_
        return (source_SD - source_mean) / source_scale, (target_TD - self.mean_) / self.scale_

    def _rows(self, X: Any) -> Array:
        check_is_fitted(self)
        rows_ND = validate_data(self, X, dtype=np.float64, reset=False)
        with np.errstate(over="ignore"):
            rows_ND = np.asarray((rows_ND - self.mean_) / self.scale_)
        check_size(rows_ND, LARGEST_VALUE, "a row, standardised,")
        return rows_ND

    def _fit_rows(self, rows: Rows, seed: int) -> None:
        raise NotImplementedError

    def _probabilities(self, rows_ND: Array) -> Array:
        raise NotImplementedError

    def predict_proba(self, X: Any) -> Array:
        """Return N x C probabilities, columns in the order of `classes_`."""
        return self._probabilities(self._rows(X))

    def predict(self, X: Any) -> NDArray[Any]:
        best_N = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best_N])


def _target_rows(domain: Any, unlabelled_N: Flags) -> Flags:
    """Return which rows belong to the target, by the `domain` given to `fit`."""
    domain_N = column_or_1d(domain)
    if len(domain_N) != len(unlabelled_N):
        rows = len(unlabelled_N)
        raise ValueError(f"`domain` should have one value per row ({rows}), found {len(domain_N)}")
    if not np.isin(domain_N, [0, 1]).all():
        raise ValueError("`domain` should be 0 for rows of the source and 1 for rows of the target")
    is_target_N = np.asarray(domain_N == 1)
    if (unlabelled_N & ~is_target_N).any():
        raise ValueError("a row of the source (`domain` 0) has no label (-1)")
    return is_target_N


def _fault(setting: Setting, value: Any) -> str | None:
    """Describe what a value should be; None if it fits the setting."""
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


def check_size(rows_ND: Array, largest: float, what: str) -> None:
    if rows_ND.size and not np.abs(rows_ND).max() <= largest:
        found = float(np.abs(rows_ND).max())
        raise ValueError(
            f"{what} holds a value of {found:.1e}, and numbers above {largest:.0e} overflow; scale "
            "the features down"
        )
