from typing import Literal

import numpy as np
import pytest

from certvol.data.target_prior import TargetPrior
from certvol.methods import discover
from certvol.settings import TrainingConfig
from certvol.training.planner import Planner, SourceRows, adaptation_rate, stage_of, steps_per_cycle

SOURCE_LABELS = np.array([0] * 20 + [1] * 4 + [2] * 4)
TARGET_LABELS = np.array([0] * 28 + [1, 2])


def _planner(batches: str, usual: Literal["balanced", "plain"]) -> Planner:
    settings = TrainingConfig(batch_size=24, batches=batches, class_power=0.0)  # type: ignore[arg-type]
    kept, prior = np.arange(len(SOURCE_LABELS)), TargetPrior(np.ones(3, dtype=bool))
    source = SourceRows(kept, SOURCE_LABELS)
    return Planner(settings, source, prior, len(TARGET_LABELS), usual)


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
    even, uneven = [1 / 3] * 3, [20 / 28, 4 / 28, 4 / 28]
    assert planner.trained_shares_C == pytest.approx(even if pretraining else uneven)
    assert planner.adapted_shares_C == pytest.approx(even if adaptation else uneven)
    plan, _ = planner.labelled_adaptation(0, 0, 1, TARGET_LABELS)
    of_target = np.bincount(plan.labels_SN[0, plan.num_source_S[0] :], minlength=3)
    assert (len(set(of_target.tolist())) == 1) is adaptation
    assert of_target[0] >= (
        4 if adaptation else 10
    )  # 10 of 12 at least, as only two target images have another label


def test_methods_whose_losses_compare_domains_use_plain_batches() -> None:
    plain = {name for name, method in discover().items() if method.batches == "plain"}
    assert plain >= {
        "cdan", "dan", "dann", "deep_coral", "mcc", "mstn",
        "rsda_dann", "rsda_mstn", "self_ensembling", "symnets"
    }  # fmt: skip
    assert not plain & {"basic", "can", "cvp", "ubr2s", "ufal"}


def test_the_schedule_of_can() -> None:
    config = TrainingConfig(learning_rate=5e-4)
    assert adaptation_rate(config, 0) == pytest.approx(5e-4)
    assert adaptation_rate(config, 0.5) == pytest.approx(5e-4 / 6**0.75)
    assert adaptation_rate(config, 1) == pytest.approx(5e-4 / 11**0.75)
    assert adaptation_rate(TrainingConfig(schedule_exponent=2.25), 1) == pytest.approx(
        5e-4 / 11**2.25
    )


def test_adaptation_can_have_a_constant_rate_of_its_own() -> None:
    config = TrainingConfig(learning_rate=5e-4, adapt_learning_rate=2.5e-4, schedule="constant")
    assert [adaptation_rate(config, p) for p in (0, 0.5, 1)] == [2.5e-4] * 3


@pytest.mark.parametrize(
    ("classes", "steps"), [(10, 5), (12, 5), (31, 10), (123, 40), (16, 5), (17, 10)]
)
def test_the_authors_steps_per_cycle(classes: int, steps: int) -> None:
    assert steps_per_cycle(TrainingConfig(cycle_steps=0), classes) == steps
    assert steps_per_cycle(TrainingConfig(cycle_steps=7), classes) == 7


def test_every_stage_has_all_cycles() -> None:
    assert [stage_of(cycle, 2) for cycle in range(5)] == [
        (0, 0, 2),
        (0, 0, 2),
        (1, 2, 4),
        (1, 2, 4),
        (2, 4, 6),
    ]
    assert stage_of(3, 40) == (0, 0, 40)
