"""The target prior: what a user knows about how often each class occurs in the target.

It decides which classes pseudo-labels may take, which classes batches visit (`Planner`) and what
the guard considers a collapse. It also corrects predictions: the model's posterior is multiplied by
the ratio of the prior to the class shares that the model was trained with, which may differ between
pretraining and adaptation (`PriorShift`). The correction would be exact for calibrated posteriors.
It uses the logits without calibrating them, so overconfident ones are corrected too little.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import Indices
from certvol.data.folders import name_some, printable, reason_of
from certvol.errors import UserError
from certvol.files import check_regular, fingerprint_of
from certvol.progress import percent
from certvol.scores.validators import effective_number
from certvol.settings import DataConfig, nearest

Shares = NDArray[np.float64]
WORDS = ("unknown", "balanced", "source")
COLUMNS = ("class", "share")
ABSENT = -1e4  # added to the logits of absent classes; finite, so that no arithmetic gives NaN
CONTRADICTED = 0.5  # share of predictions that must be wrong if the prior is right


@dataclass(frozen=True, eq=False)
class TargetPrior:
    """The classes of the target and, unless they are unknown, their shares."""

    allowed_C: NDArray[np.bool_]
    shares_C: Shares | None = None
    """The shares add up to 1; they are 0 for classes that are not allowed."""

    @property
    def says_anything(self) -> bool:
        return self.shares_C is not None or not self.allowed_C.all()

    @property
    def fingerprint(self) -> str:
        shares_C = np.empty(0) if self.shares_C is None else self.shares_C
        return fingerprint_of(self.allowed_C.tobytes(), shares_C.tobytes())

    @property
    def classes_expected(self) -> float | None:
        """Effective number of classes: exp of the entropy of the shares; None if unknown."""
        if self.shares_C is not None:
            return effective_number(self.shares_C)
        return None if self.allowed_C.all() else float(self.allowed_C.sum())

    def shift(self, trained_C: Shares) -> Tensor | None:
        """Return what is added to logits of a model trained with these class shares."""
        if not self.says_anything:
            return None
        shares_C = np.ones(len(trained_C)) if self.shares_C is None else self.shares_C
        trained_C = np.ones(len(trained_C)) if self.shares_C is None else trained_C
        ratio_C = np.where(self.allowed_C, shares_C / np.maximum(trained_C, 1e-12), 1.0)
        shift_C = np.where(self.allowed_C, np.log(ratio_C), ABSENT)
        return torch.from_numpy(shift_C).float()

    def contradiction(self, predicted_C: Shares) -> str | None:
        """Warn if the shares of predictions that ignore the prior are far from it.

        If the prior is right, at least a share of the predictions equal to the total variation
        distance is wrong. Some always are, so only a large share counts.
        """
        outside = float(predicted_C[~self.allowed_C].sum())
        wrong = outside
        if self.shares_C is not None:
            wrong = float(np.abs(predicted_C - self.shares_C).sum() / 2)
        if wrong <= CONTRADICTED:
            return None
        if outside > CONTRADICTED:
            found = f"{percent(outside, 0)} % of them fall into classes that it rules out"
        else:
            found = f"at least {percent(wrong, 0)} % of them would be wrong"
        return (
            f"the target prior contradicts the pretrained model's predictions: {found}. If you are "
            "not sure of it, leave out `data.target_prior` and `data.target_classes`: `unknown` is "
            "the safe choice. If you are, the domain shift is large"
        )


def read_prior(config: DataConfig, classes: list[str], source_labels: Indices) -> TargetPrior:
    """Return the prior that the settings describe."""
    given, allowed_C = config.target_prior, _named(config.target_classes, classes)
    if given in WORDS:
        return _restricted(_shares_of(given, len(classes), source_labels), allowed_C)
    return _restricted(_read_shares(Path(given), classes), allowed_C)


def prior_of(given: Any, classes: list[Any], source_labels: Indices) -> TargetPrior:
    """Return the prior of an estimator: a word, or a mapping of class to share or count."""
    everything_C = np.ones(len(classes), dtype=bool)
    if isinstance(given, str) and given in WORDS:
        return _restricted(_shares_of(given, len(classes), source_labels), everything_C)
    if not isinstance(given, Mapping):
        words = ", ".join(map(repr, WORDS))
        raise ValueError(f"`target_prior` should be {words} or a dict of shares, found {given!r}")
    shares_C = np.zeros(len(classes))
    for name, share in given.items():
        if name not in classes:
            raise ValueError(f"`target_prior` names {name!r}, which no labelled row has")
        shares_C[classes.index(name)] = float(share)
    if not (np.isfinite(shares_C).all() and (shares_C >= 0).all() and shares_C.sum() > 0):
        raise ValueError("`target_prior`: shares must be 0 or more, with at least one above 0")
    return _restricted(shares_C, everything_C)


def _shares_of(word: str, num_classes: int, source_labels: Indices) -> Shares | None:
    if word == "unknown":
        return None
    if word == "balanced":
        return np.ones(num_classes)
    return np.bincount(source_labels, minlength=num_classes).astype(np.float64)


def _restricted(shares_C: Shares | None, allowed_C: NDArray[np.bool_]) -> TargetPrior:
    if shares_C is None:
        return TargetPrior(allowed_C)
    shares_C = np.where(allowed_C, shares_C, 0.0)
    if shares_C.sum() <= 0:
        raise UserError(
            "`data.target_prior` leaves no class of `data.target_classes`; change one of the two"
        )
    return TargetPrior(shares_C > 0, shares_C / shares_C.sum())


def _named(text: str | None, classes: list[str]) -> NDArray[np.bool_]:
    """Return which classes `a,b,c` names; all if the text is empty."""
    if text is None:
        return np.ones(len(classes), dtype=bool)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _known(name, classes, "`data.target_classes`")
    return np.isin(classes, names)


def _known(name: str, classes: list[str], where: str) -> int:
    if name not in classes:
        raise UserError(
            f"{where} names `{printable(name[:50])}`, which is not a class of the source"
            f"{nearest(name[:50], classes)} (classes: {name_some(classes)})"
        )
    return classes.index(name)


def _read_shares(path: Path, classes: list[str]) -> Shares:
    """Read a CSV of class and share. Shares may be counts; classes that it leaves out get 0."""
    where = f"the target prior {printable(str(path))}"
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            if tuple(names[:2]) != COLUMNS or len(set(names)) < len(names):
                raise UserError(f"{where} should begin with the line `class,share`")
            rows = []
            for row in reader:
                if None in row:  # a decimal comma would cut 1,5 off to 1
                    raise UserError(
                        f"{where}: line {reader.line_num} has more cells than the first line; "
                        "write shares with a decimal point, and names with commas in quotes"
                    )
                rows.append((row["class"] or "", row["share"] or ""))
    except FileNotFoundError:
        raise UserError(
            f"there is no file {printable(str(path))}; `data.target_prior` is "
            f"{', '.join(WORDS)} or a CSV of class and share"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {where}: {reason_of(error)}") from None
    shares_C, named = np.zeros(len(classes)), set[int]()
    for name, text in rows:
        number = _known(name, classes, where)
        try:
            share = float(text)
        except ValueError:
            share = float("nan")
        if not 0 <= share < 1e12:
            raise UserError(
                f"{where}: the share of `{printable(name)}` must be a number, 0 or more"
            )
        if number in named:
            raise UserError(f"{where} names `{printable(name)}` twice")
        named.add(number)
        shares_C[number] = share
    if shares_C.sum() <= 0:
        raise UserError(f"{where} gives no class a share above 0")
    return shares_C
