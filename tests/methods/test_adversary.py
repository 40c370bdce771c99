import pytest
import torch

from certvol.methods._adversary import DomainDiscriminator, reverse_gradient


@pytest.mark.parametrize("coefficient", [0.0, 0.25, 1.0])
def test_reversal_passes_values_and_flips_gradients_exactly(coefficient: float) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    scale = torch.tensor(coefficient)
    plain = (x.detach() ** 3).requires_grad_()
    weights = torch.randn(4, 3)
    (weights * plain).sum().backward()
    y = reverse_gradient(x, scale)
    assert torch.equal(y, x)
    (weights * y).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, -coefficient * plain.grad)


def test_reversal_keeps_the_type_of_the_gradient() -> None:
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    reverse_gradient(x, torch.tensor(0.5)).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad == -0.5).all()


def test_the_discriminator_learns_to_tell_domains_apart_and_its_input_learns_to_hide_them() -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 5)
    rows[:32] += 1
    of_source = (torch.arange(64) < 32).float()
    discriminator = DomainDiscriminator(5, 32)
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(
            discriminator(rows), of_source
        ).backward()
        optimizer.step()
    assert ((discriminator(rows) > 0) == (of_source > 0)).float().mean() > 0.9
    shift = torch.zeros(5, requires_grad=True)
    moved = rows - shift * of_source[:, None]
    logits = discriminator(reverse_gradient(moved, torch.tensor(1.0)))
    torch.nn.functional.binary_cross_entropy_with_logits(logits, of_source).backward()
    assert shift.grad is not None
    assert shift.grad.sum() < 0  # a step against it shifts the source towards the target


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows_and_equal_rows_give_finite_logits(rows: int, batch_norm: bool) -> None:
    logits = DomainDiscriminator(5, 8, batch_norm=batch_norm, dropout=0.5)(torch.zeros(rows, 5))
    assert logits.shape == (rows,)
    assert torch.isfinite(logits).all()


def test_the_discriminator_keeps_no_statistics() -> None:
    assert not list(DomainDiscriminator(5, 8).buffers())
