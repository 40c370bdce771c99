import math

import pytest
import torch

from certvol.scores.uncertainty import (
    FROM_LOGITS,
    LABEL_FREE,
    MEASURES,
    Measure,
    entropy,
    logit_measures,
)


def test_logits_by_hand() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0], [0.0, 0.0, 0.0], [-1.0, -3.0, -1.5]])
    found = logit_measures(logits, torch.tensor([2, 0, 1]))
    assert found["logit"].tolist() == [4, 0, -1]
    assert found["logit_gt"].tolist() == [2, 0, -3]
    assert found["logit_diff"].tolist() == [2, 0, 0.5]
    assert "logit_gt" not in logit_measures(logits)


def test_probability_and_entropy_by_hand() -> None:
    found = logit_measures(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log())
    assert found["probability"].tolist() == pytest.approx([0.5, 1 / 3])
    assert found["entropy"].tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


def test_entropy_of_a_certain_image_is_zero_not_minus_zero_with_finite_gradients() -> None:
    probabilities = torch.tensor([[1.0, 0.0]], requires_grad=True)
    value = entropy(probabilities)
    assert (value.item(), math.copysign(1, value.item())) == (0, 1)
    (gradient,) = torch.autograd.grad(value.sum(), probabilities)
    assert gradient.isfinite().all()


def test_half_precision_logits_are_measured_in_float32() -> None:
    logits = torch.tensor([[8.0, 7.0, 1.0]], dtype=torch.bfloat16)
    expected = logit_measures(logits.float())
    for name, values in logit_measures(logits).items():
        assert values.dtype == torch.float32
        assert torch.equal(values, expected[name])


def test_every_measure_points_the_way_the_table_says() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 0.9, 0.8]])  # a clear image, a doubtful one
    values = logit_measures(logits, torch.tensor([0, 0]))
    for name, (clear, doubtful) in values.items():
        assert (clear > doubtful) == MEASURES[name].more_is_certain, name
    assert set(MEASURES) - set(values) == {"sigma", "mcd_mu", "mcd_sigma"}
    assert set(MEASURES) - set(LABEL_FREE) == {"logit_gt"}


def test_a_new_measure_of_the_logits_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Measure("smallest logit", from_logits=lambda logits_NC: logits_NC.amin(dim=1))
    monkeypatch.setitem(MEASURES, "smallest", new)
    assert logit_measures(torch.tensor([[3.0, 1.0]]))["smallest"].tolist() == [1.0]


def test_measures_that_follow_from_the_logits_are_named() -> None:
    assert set(FROM_LOGITS) == set(logit_measures(torch.zeros(1, 3)))
