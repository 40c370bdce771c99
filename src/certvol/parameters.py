"""Checks of what the estimators of `certvol.sklearn` are given, when they are fitted: a ValueError in one sentence."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

Check = Callable[[Any], str | None]
"""What a value should be, in words, where it is not that."""

LARGEST = 2**31 - 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: int, most: int = LARGEST) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, Integral) or isinstance(value, bool):
            return "a whole number"
        if value < least:
            return "above 0" if value < 1 <= least else f"{least} or more"
        return None if value <= most else f"at most {most}"

    return check


def above_zero(value: Any) -> str | None:
    if not _is_number(value):
        return "a finite number above 0"
    return None if value > 0 else "above 0"


def not_negative(value: Any) -> str | None:
    return None if _is_number(value) and value >= 0 else "a finite number, 0 or more"


def share(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value < 1 else "a number from 0 to below 1"


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool | np.bool_) else "True or False"


def one_of(*values: Any) -> Check:
    words = [repr(value) for value in values]
    text = f"{', '.join(words[:-1])} or {words[-1]}"
    return lambda value: None if any(value is v or (isinstance(value, str) and value == v) for v in values) else text


def or_none(check: Check) -> Check:
    def checked(value: Any) -> str | None:
        wanted = None if value is None else check(value)
        return None if wanted is None else f"None or {wanted}"

    return checked


def device(value: Any) -> str | None:
    """Of this machine. `cuda` where torch has none would only fail once the data is on its way there."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError):
        return "'cpu', 'cuda' or 'cuda:N'"
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        return "'cpu', 'cuda' or 'cuda:N'"
    if not torch.cuda.is_available():
        return "'cpu', as this machine or this build of torch has no usable CUDA device"
    count = torch.cuda.device_count()
    return None if (found.index or 0) < count else f"one of the {count} CUDA devices, from 'cuda:0'"


CHECKS: Mapping[str, Check] = {
    "num_samples": whole(1),
    "samples_weight": not_negative,
    "antagonistic": flag,
    "standardize": one_of("joint", "domain", None),
    "adapter": flag,
    "dropout": share,
    "pretrain_steps": whole(1),
    "cycles": whole(0),
    "cycle_steps": whole(1),
    "batch_size": whole(4, 2**16),
    "learning_rate": or_none(above_zero),
    "momentum": share,
    "weight_decay": not_negative,
    "device": device,
    "ridge": above_zero,
    "C": above_zero,
    "n_components": whole(1),
    "iterations": whole(1),
}


def check_parameters(given: Mapping[str, Any]) -> None:
    """All but `random_state`, which scikit-learn checks itself."""
    for name, value in given.items():
        wanted = CHECKS[name](value) if name in CHECKS else None
        if wanted is not None:
            raise ValueError(f"`{name}` should be {wanted}, found {value!r}")
