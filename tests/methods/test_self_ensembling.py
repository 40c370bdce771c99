from pathlib import Path

import pytest
import torch
from torch import Tensor

import certvol
import references
from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.methods._base import Batch
from certvol.methods.self_ensembling import class_balance, consistency
from certvol.settings import resolve
from support.images import tiny, write_domain
from support.methods import fitted, make_batch, make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    common_logits,
    features_of,
    negative_log_likelihood,
)
from support.reporter import RecordingReporter


def test_consistency_is_the_mean_square_over_rows_with_a_sure_teacher() -> None:
    student, teacher = (
        torch.tensor([[0.5, 0.5], [0.2, 0.8]]),
        torch.tensor([[1.0, 0.0], [0.6, 0.4]]),
    )
    assert consistency(student, teacher, torch.tensor([1.0, 0.0])).item() == pytest.approx(0.25 / 2)
    assert consistency(teacher, teacher, torch.ones(2)).item() == 0


@pytest.mark.parametrize("quirk", [False, True])
def test_balance_equals_the_formula(quirk: bool) -> None:
    p = torch.rand(7, 5).softmax(1)
    assert class_balance(p, quirk).item() == pytest.approx(
        references.class_balance(p, quirk), rel=1e-5
    )


def test_balance_is_least_for_equally_frequent_classes() -> None:
    even = class_balance(torch.eye(4))
    assert even < class_balance(torch.eye(4)[[0, 0, 1, 2]])
    assert torch.isfinite(class_balance(torch.eye(4)[[0, 0]]))
    assert class_balance(torch.empty(0, 4)).item() == 0


@pytest.mark.parametrize("norm", ["mixed", "per_domain"])
def test_the_teacher_sees_the_other_view_with_the_batchs_own_statistics(norm: str) -> None:
    method = make_method("self_ensembling").train()
    method.network.classifier.dropout = 0.0
    method.network.domains.mode = norm
    batch = fitted(method, make_batch())
    weights = dict(method.named_parameters())
    other = batch.other_inputs
    assert other is not None
    expected = (
        features_of(weights, other)[8:] if norm == "mixed" else features_of(weights, other[8:])
    )
    with torch.no_grad():
        found = method._teach(batch)
    assert torch.allclose(found, torch.softmax(common_logits(weights, expected), 1), atol=1e-5)


@pytest.mark.parametrize("quirks", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(quirks: bool) -> None:
    method = make_method("self_ensembling", threshold=0.3, teacher_decay=0.9, quirks=quirks)
    teacher: Weights = {}

    def loss(weights: Weights, batch: Batch) -> Tensor:
        for name, value in weights.items():
            value = value.detach()
            teacher[name] = 0.9 * teacher[name] + 0.1 * value if name in teacher else value.clone()
        assert batch.other_inputs is not None
        taught = torch.softmax(common_logits(teacher, features_of(teacher, batch.other_inputs)), 1)[
            8:
        ]
        logits = common_logits(weights, features_of(weights, batch.inputs))
        p = torch.softmax(logits[8:], 1)
        sure = (taught.max(1).values > 0.3).float()
        q = p.mean(0)
        balance = -(q.log() / 4 + 0.75 * torch.log(1 + q if quirks else 1 - q)).sum() * sure.mean()
        agree = (sure * ((p - taught) ** 2).mean(1)).mean()
        source = torch.softmax(logits[:8], 1) if quirks else logits[:8]
        return negative_log_likelihood(source, batch.labels_N[:8]) + 10 * agree + 0.1 * balance

    assert_steps_are(method, loss)


def test_under_mixed_precision_the_student_does_not_get_the_teachers_weights() -> None:
    """Autocast caches converted weights by parameter while its context lasts."""
    method = make_method("self_ensembling").train()
    method.network.classifier.dropout = 0.0
    with torch.no_grad():
        for name, buffer in method.teacher.named_buffers():
            if name.endswith("weight"):
                buffer.zero_()
    batch = fitted(method, make_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method.loss(method.loss_terms(batch)).backward()
    gradients = [
        p.grad.abs().sum()
        for name, p in method.named_parameters()
        if name.endswith("output.weight")
    ]
    assert all(gradient > 0 for gradient in gradients)
    plain = make_method("basic").train()
    plain.network.classifier.dropout = 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = plain.network.classifier(plain.network.features(batch.inputs))
    again = method.loss_terms(batch)["ce"]
    assert again.item() == pytest.approx(
        negative_log_likelihood(logits[:8].float(), batch.labels_N[:8]).item(), abs=0.05
    )


def test_a_second_teacher_in_the_settings_gives_a_warning(tmp_path: Path) -> None:
    source, target = (
        write_domain(tmp_path / "source", 4),
        write_domain(tmp_path / "target", 4, seed=1),
    )
    reporter = RecordingReporter()
    settings = tiny(method__name="self_ensembling", training__teacher=0.5, training__cycles=1)
    certvol.adapt(source, target, out=tmp_path / "run", reporter=reporter, **settings)
    assert any(
        "`training.teacher` is ignored, set `method.teacher_decay` instead" in text
        for text in reporter.warned
    )


def test_no_probability_is_above_a_threshold_of_1() -> None:
    with pytest.raises(UserError, match=r"`method.threshold` should be below 1, found 1.5"):
        resolve(
            config_classes(), overrides={"method.name": "self_ensembling", "method.threshold": 1.5}
        )
