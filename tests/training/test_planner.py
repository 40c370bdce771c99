from typing import Literal

import numpy as np
import pytest

from certvol.config import TrainingConfig
from certvol.methods import discover
from certvol.training.planner import Planner

SOURCE_LABELS = np.array([0] * 20 + [1] * 4 + [2] * 4)
TARGET_LABELS = np.array([0] * 28 + [1, 2])


def _planner(batches: str, usual: Literal["balanced", "plain"]) -> Planner:
    settings = TrainingConfig(batch_size=24, batches=batches)  # type: ignore[arg-type]
    return Planner(settings, np.arange(len(SOURCE_LABELS)), SOURCE_LABELS, 3, len(TARGET_LABELS), usual)


@pytest.mark.parametrize(
    ("batches", "usual", "pretraining", "adaptation"),
    [
        ("auto", "balanced", True, True),
        ("auto", "plain", True, False),
        ("balanced", "plain", True, True),
        ("plain", "balanced", False, False),
    ],
)
def test_which_batches_are_balanced(
    batches: str, usual: Literal["balanced", "plain"], pretraining: bool, adaptation: bool
) -> None:
    planner = _planner(batches, usual)
    of_source = np.bincount(planner.pretraining(0, 0, 1).labels_SN[0], minlength=3)
    assert (len(set(of_source.tolist())) == 1) is pretraining
    plan, _ = planner.labelled_adaptation(0, 0, 1, TARGET_LABELS)
    of_target = np.bincount(plan.labels_SN[0, plan.num_source_S[0] :], minlength=3)
    assert (len(set(of_target.tolist())) == 1) is adaptation
    assert of_target[0] >= (4 if adaptation else 10)  # 10 of 12 at least, as only two target images have another label


def test_methods_that_take_the_target_rows_for_a_sample_of_the_target_are_known() -> None:
    plain = {name for name, method in discover().items() if method.batches == "plain"}
    assert plain >= {
        "cdan", "dan", "dann", "deep_coral", "mcc", "mstn", "rsda_dann", "rsda_mstn", "self_ensembling", "symnets"
    }  # fmt: skip
    assert not plain & {"basic", "can", "cvp", "ubr2s", "ufal"}
