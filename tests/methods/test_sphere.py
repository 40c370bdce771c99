import pytest
import torch
from torch import nn

import references
from certvol.methods._sphere import (
    SphericalClassifier,
    SphericalDiscriminator,
    SphericalLayer,
    SphericalLinear,
    exp_map,
    log_map,
    unit,
)

RADIUS = 3.0


def test_exponential_and_logarithmic_map_invert_each_other() -> None:
    """Angles from 0.02 to 3.12: nearer to the poles the cosine is shrunk to keep slopes finite."""
    torch.manual_seed(0)
    angles = torch.linspace(0.02, 3.12, 50, dtype=torch.float64)[:, None]
    direction = torch.randn(50, 4, dtype=torch.float64)
    tangent = RADIUS * angles * direction / direction.norm(dim=1, keepdim=True)
    assert torch.allclose(log_map(exp_map(tangent, RADIUS), RADIUS), tangent, rtol=1e-4, atol=0)
    on_sphere = RADIUS * unit(torch.randn(50, 5, dtype=torch.float64))
    assert torch.allclose(exp_map(log_map(on_sphere, RADIUS), RADIUS), on_sphere, atol=1e-5)
    assert exp_map(tangent, RADIUS).norm(dim=1).tolist() == pytest.approx([RADIUS] * 50, rel=1e-4)


def test_the_tangent_vector_is_as_long_as_the_arc_from_the_pole() -> None:
    quarter = torch.tensor([[RADIUS, 0.0, 0.0]])  # on the equator
    assert log_map(quarter, RADIUS)[0].tolist() == pytest.approx(
        [RADIUS * torch.pi / 2, 0.0], rel=1e-3
    )


def test_a_layer_equals_the_formula_and_stays_on_the_sphere() -> None:
    torch.manual_seed(0)
    layer = SphericalLayer(5, 4, RADIUS, 0.5).eval()
    x = RADIUS * unit(torch.randn(6, 5))
    found = layer(x)
    for row, out in zip(x, found, strict=True):
        expected = references.spherical_layer(
            row, layer.linear.weight.detach(), layer.linear.bias.detach(), RADIUS
        )
        assert out.tolist() == pytest.approx(expected.tolist(), abs=1e-2)
    assert found.norm(dim=1).tolist() == pytest.approx([RADIUS] * 6, rel=1e-4)


def test_a_discriminator_has_the_published_dropout() -> None:
    judge = SphericalDiscriminator(8, RADIUS, hidden=9)
    x = RADIUS * unit(torch.randn(6, 8))
    assert not torch.equal(judge.train()(x), judge(x))
    assert torch.equal(judge.eval()(x), judge(x))


def test_spherical_logits_do_not_depend_on_the_length_of_the_weights() -> None:
    cut = SphericalLinear(4, 3, RADIUS)
    cut.bias.data = torch.tensor([0.0, 1.0, -1.0])
    x = RADIUS * unit(torch.randn(5, 4))
    before = cut(x)
    cut.weight.data *= 7
    assert torch.allclose(cut(x), before, atol=1e-5)
    assert (before.abs() <= 2 * RADIUS + 1e-4).all()


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e6])
def test_features_of_zero_and_of_any_size_give_finite_values_and_gradients(scale: float) -> None:
    torch.manual_seed(0)
    head, judge = (
        SphericalClassifier(4, 3, RADIUS, width=8),
        SphericalDiscriminator(8, RADIUS, hidden=9),
    )
    head.bottleneck.bias.data.zero_()
    features = (scale * torch.randn(5, 4)).requires_grad_()
    total = head(features).sum() + judge(head.embed(features)).sum()
    learning = [features, *head.parameters(), *judge.parameters()]
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, learning))


def test_given_dropout_works_in_evaluation_too() -> None:
    head = SphericalClassifier(16, 3, RADIUS).eval()
    features = torch.randn(4, 16)
    assert torch.equal(head(features), head(features))
    assert not torch.equal(head(features, nn.Dropout(0.5)), head(features, nn.Dropout(0.5)))
