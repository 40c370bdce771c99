import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import references
from certvol.methods import _losses as losses


def test_cross_entropy_of_equal_logits_is_log_c() -> None:
    values = losses.cross_entropy(torch.zeros(3, 7), torch.tensor([0, 3, 6]))
    assert values.tolist() == pytest.approx([math.log(7)] * 3)


def test_samples_cross_entropy_of_equal_logits_is_log_c() -> None:
    assert losses.samples_cross_entropy(
        torch.ones(2, 5, 4), torch.tensor([1, 3])
    ).tolist() == pytest.approx([math.log(4)] * 2)


def test_samples_cross_entropy_of_two_known_samples() -> None:
    # Softmax of (log 3, 0) is (3/4, 1/4), of (0, 0) is (1/2, 1/2).
    logits_NMC = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]])
    assert losses.samples_cross_entropy(logits_NMC, torch.tensor([0])).item() == pytest.approx(
        (math.log(4 / 3) + math.log(2)) / 2
    )


def test_samples_cross_entropy_is_the_naive_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NMC = torch.randn(5, 6, 4, generator=generator) * 3
    labels_N = torch.tensor([0, 1, 2, 3, 3])
    expected = references.samples_cross_entropy(logits_NMC, labels_N)
    assert losses.samples_cross_entropy(logits_NMC, labels_N).tolist() == pytest.approx(
        expected, rel=1e-5
    )


def test_sigma_target_is_kappa_without_loss_and_zero_at_kappa_and_beyond() -> None:
    target = losses.sigma_target(torch.tensor([0.0, math.log(10), 5.0]), 10)
    assert target.tolist() == pytest.approx([math.log(10), 0.0, 0.0])


def test_antagonistic_loss_is_zero_if_sigma_equals_its_target() -> None:
    samples_ce_N = torch.tensor([0.0, 1.0, 9.0])
    sigma_N = torch.tensor([math.log(10), math.log(10) - 1, 0.0])
    assert losses.antagonistic(sigma_N, samples_ce_N, 10).tolist() == pytest.approx(
        [0, 0, 0], abs=1e-6
    )


def test_antagonistic_loss_by_hand() -> None:
    # psi = log 10 everywhere; distances 0.5 and 3.
    sigma_N = torch.tensor([math.log(10) + 0.5, math.log(10) + 3])
    assert losses.antagonistic(sigma_N, torch.zeros(2), 10).tolist() == pytest.approx(
        [0.125, 2.5], rel=1e-5
    )


def test_antagonistic_loss_is_the_naive_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    sigma_N, samples_ce_N = (
        torch.rand(20, generator=generator) * 6,
        torch.rand(20, generator=generator) * 5,
    )
    expected = references.antagonistic(sigma_N, samples_ce_N, 31)
    assert losses.antagonistic(sigma_N, samples_ce_N, 31).tolist() == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )


def test_antagonistic_loss_has_no_jump_at_distance_one() -> None:
    at = math.log(10) + 1
    low, high = losses.antagonistic(
        torch.tensor([at - 1e-3, at + 1e-3]), torch.zeros(2), 10
    ).tolist()
    assert high - low == pytest.approx(2e-3, rel=0.05)


@pytest.mark.parametrize(("sigma", "sign"), [(0.1, -1), (5.0, 1)])
def test_antagonistic_gradient_pulls_sigma_to_its_target(sigma: float, sign: int) -> None:
    sigma_N = torch.tensor([sigma], requires_grad=True)
    losses.antagonistic(sigma_N, torch.tensor([0.3]), 10).sum().backward()
    assert sigma_N.grad is not None
    assert torch.sign(sigma_N.grad).item() == sign


def test_no_gradient_flows_through_the_target_of_sigma() -> None:
    samples_ce_N = torch.tensor([0.3], requires_grad=True)
    sigma_N = torch.tensor([1.0], requires_grad=True)
    losses.antagonistic(sigma_N, samples_ce_N, 10).sum().backward()
    assert samples_ce_N.grad is None


def test_losses_are_float32_for_half_precision_logits() -> None:
    logits = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert losses.samples_cross_entropy(logits, torch.tensor([0, 1])).dtype == torch.float32
    assert losses.cross_entropy(logits[:, 0], torch.tensor([0, 1])).dtype == torch.float32
    assert (
        losses.antagonistic(torch.ones(2, dtype=torch.bfloat16), torch.zeros(2), 4).dtype
        == torch.float32
    )


def test_mean_cross_entropy_averages_and_is_zero_of_no_images() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    assert torch.allclose(
        losses.mean_cross_entropy(logits, labels), losses.cross_entropy(logits, labels).mean()
    )
    assert losses.mean_cross_entropy(logits[:0], labels[:0]).item() == 0


def test_the_ramp_rises_from_zero_as_the_formula_says() -> None:
    for p in (0.0, 0.1, 0.5, 1.0):
        expected = 2 / (1 + math.exp(-10 * p)) - 1
        assert losses.ramp(torch.tensor(p)).item() == pytest.approx(expected, abs=1e-6)


def test_domain_confusion_of_a_clueless_discriminator_is_log_two() -> None:
    assert losses.domain_confusion(torch.zeros(7), 3).item() == pytest.approx(math.log(2))


def test_domain_confusion_is_the_naive_loop() -> None:
    logits, certainty = torch.randn(9), torch.rand(9) + 0.1
    for weights in (None, certainty):
        expected = references.domain_confusion(logits, 4, weights)
        assert losses.domain_confusion(logits, 4, weights).item() == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.parametrize("num_source", [0, 6])
def test_domain_confusion_of_one_domain_is_zero_with_zero_gradients(num_source: int) -> None:
    logits = (torch.randn(6) * 1e4).requires_grad_()
    loss = losses.domain_confusion(logits, num_source, torch.ones(6))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_coral_of_equal_covariances_is_zero_whatever_the_means() -> None:
    rows = torch.randn(20, 6)
    assert losses.coral(rows, rows + 3).item() == pytest.approx(0, abs=1e-9)


def test_coral_of_two_known_variances() -> None:
    # Variances 2 and 8 of one feature: (2 - 8)^2 / 4.
    assert losses.coral(
        torch.tensor([[-1.0], [1.0]]), torch.tensor([[-2.0], [2.0]])
    ).item() == pytest.approx(9)


def test_coral_is_the_naive_loop() -> None:
    source, target = torch.randn(7, 4), torch.randn(9, 4) * 2
    assert losses.coral(source, target).item() == pytest.approx(
        references.coral(source, target), rel=1e-4
    )


def test_biased_mmd_of_equal_samples_is_zero_in_any_order() -> None:
    rows = torch.randn(12, 5)
    shuffled = rows[torch.randperm(12)]
    assert losses.maximum_mean_discrepancy(rows, shuffled, biased=True).item() == pytest.approx(
        0, abs=1e-5
    )


def test_mmd_of_two_distant_points_by_hand() -> None:
    # Two points at distance d, three times each: 18 of 30 pairs are at d, so m = 18 d^2 / 30.
    source, target = torch.zeros(3, 2), torch.tensor([[3.0, 4.0]] * 3)
    expected = sum(2 - 2 * math.exp(-30 / (2 * scale * 18)) for scale in (0.5, 1, 2))
    for biased in (False, True):
        assert losses.maximum_mean_discrepancy(
            source, target, biased=biased
        ).item() == pytest.approx(expected)


@pytest.mark.parametrize("biased", [False, True])
def test_mmd_is_the_naive_loop(biased: bool) -> None:
    source, target = torch.randn(6, 4), torch.randn(9, 4) + 1
    expected = references.maximum_mean_discrepancy(source, target, (0.5, 1.0, 2.0), biased)
    assert losses.maximum_mean_discrepancy(source, target, biased=biased).item() == pytest.approx(
        expected, abs=1e-5
    )


def test_mmd_without_bias_is_zero_on_average_if_the_domains_agree() -> None:
    torch.manual_seed(0)
    values = [
        losses.maximum_mean_discrepancy(torch.randn(8, 3), torch.randn(8, 3)).item()
        for _ in range(400)
    ]
    mean, error = torch.tensor(values).mean().item(), torch.tensor(values).std().item() / 20
    assert abs(mean) < 3 * error
    assert min(values) < 0 < max(values)


def test_class_confusion_of_one_hot_predictions_is_zero() -> None:
    logits = torch.eye(4).repeat(3, 1) * 1e4
    assert losses.class_confusion(logits, 2.5).item() == pytest.approx(0, abs=1e-6)


def test_class_confusion_of_even_predictions_is_all_but_the_diagonal() -> None:
    assert losses.class_confusion(torch.zeros(6, 5), 2.5).item() == pytest.approx(4 / 5)


def test_class_confusion_is_the_naive_loop() -> None:
    logits = torch.randn(9, 5) * 4
    expected = references.class_confusion(logits, 1.7)
    assert losses.class_confusion(logits, 1.7).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_class_confusion_has_no_gradient_through_the_weights_of_its_rows(
    temperature: float,
) -> None:
    logits = 3 * torch.randn(9, 5, generator=torch.Generator().manual_seed(0))

    def gradient(constant_weights: bool) -> Tensor:
        plain = logits.double().requires_grad_()
        p = torch.softmax(plain / temperature, 1)
        weights = 1 + torch.exp((p * p.log()).sum(1))
        if constant_weights:
            weights = torch.tensor(weights.tolist(), dtype=torch.float64)
        confusion = torch.einsum("n,na,nb->ab", weights / weights.mean(), p, p)
        shares = confusion / confusion.sum(1, keepdim=True)
        total = shares.sum() - shares.trace()
        return torch.autograd.grad(total / 5, plain)[0].float()

    own = logits.clone().requires_grad_()
    losses.class_confusion(own, temperature).backward()
    assert own.grad is not None
    assert torch.allclose(own.grad, gradient(True), rtol=1e-4, atol=1e-7)
    assert (gradient(False) - gradient(True)).norm() > 0.05 * gradient(True).norm()


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("target_rows", [0, 1, 2, 5])
@pytest.mark.parametrize("loss", [losses.coral, losses.maximum_mean_discrepancy])
def test_losses_of_two_domains_are_finite_or_zero_without_gradient_for_few_rows(
    loss: Callable[[Tensor, Tensor], Tensor], target_rows: int, scale: float
) -> None:
    source = (torch.randn(5, 4) * scale).requires_grad_()
    target = (torch.randn(target_rows, 4) * scale).requires_grad_()
    value = loss(source, target)
    if target_rows < 2:
        assert value.item() == 0
        assert not value.requires_grad
    else:
        _assert_finite_with_gradients(value, source, target)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_class_confusion_is_finite_for_few_zero_and_large_rows(rows: int, scale: float) -> None:
    logits = (torch.randn(rows, 4) * scale).requires_grad_()
    _assert_finite_with_gradients(losses.class_confusion(logits, 2.5), logits)


def test_mmd_with_equal_rows_has_finite_gradients() -> None:
    source = torch.ones(3, 4, requires_grad=True)
    target = torch.tensor([[1.0] * 4, [2.0] * 4], requires_grad=True)
    loss = losses.maximum_mean_discrepancy(source, target)
    _assert_finite_with_gradients(loss, source, target)


def _assert_finite_with_gradients(loss: Tensor, *inputs: Tensor) -> None:
    assert torch.isfinite(loss)
    for gradient in torch.autograd.grad(loss, inputs):
        assert torch.isfinite(gradient).all()


def test_losses_of_two_domains_stay_float32_under_autocast() -> None:
    rows = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = rows.bfloat16()
        for loss in (losses.coral, losses.maximum_mean_discrepancy):
            inside, outside = loss(half[:4], half[4:]), loss(half[:4].float(), half[4:].float())
            assert inside.dtype == torch.float32
            assert torch.equal(inside, outside)
        assert losses.class_confusion(half, 2.5).dtype == torch.float32


@pytest.mark.parametrize("classes", [2, 5])
def test_smoothed_cross_entropy_is_the_naive_loop(classes: int) -> None:
    logits, labels = torch.randn(6, classes) * 3, torch.arange(6) % classes
    found = losses.smoothed_cross_entropy(logits, labels, 0.2)
    rows = zip(logits.tolist(), labels.tolist(), strict=True)
    expected = [references.smoothed_cross_entropy(row, label, 0.2) for row, label in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
