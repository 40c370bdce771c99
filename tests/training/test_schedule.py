import pytest

from certvol.config import TrainingConfig
from certvol.training.schedule import adaptation_rate, pretraining_rate, stage_of, steps_per_cycle


def test_the_schedule_of_can() -> None:
    config = TrainingConfig(learning_rate=5e-4)
    assert adaptation_rate(config, 0) == pytest.approx(5e-4)
    assert adaptation_rate(config, 0.5) == pytest.approx(5e-4 / 6**0.75)
    assert adaptation_rate(config, 1) == pytest.approx(5e-4 / 11**0.75)
    assert adaptation_rate(TrainingConfig(schedule_exponent=2.25), 1) == pytest.approx(5e-4 / 11**2.25)


def test_a_constant_rate_of_its_own_for_adaptation() -> None:
    config = TrainingConfig(learning_rate=5e-4, adapt_learning_rate=2.5e-4, schedule="constant")
    assert pretraining_rate(config) == 5e-4
    assert [adaptation_rate(config, p) for p in (0, 0.5, 1)] == [2.5e-4] * 3


@pytest.mark.parametrize(("classes", "steps"), [(10, 5), (12, 5), (31, 10), (123, 40), (16, 5), (17, 10)])
def test_the_authors_steps_per_cycle(classes: int, steps: int) -> None:
    assert steps_per_cycle(TrainingConfig(cycle_steps=0), classes) == steps
    assert steps_per_cycle(TrainingConfig(cycle_steps=7), classes) == 7


def test_every_stage_has_all_cycles() -> None:
    assert [stage_of(cycle, 2) for cycle in range(5)] == [(0, 0, 2), (0, 0, 2), (1, 2, 4), (1, 2, 4), (2, 4, 6)]
    assert stage_of(3, 40) == (0, 0, 40)
