from dataclasses import replace

import pytest
import torch
from torch import nn

import references
from certvol.nn import norm


def _layer(mode: norm.Mode) -> tuple[norm.DomainBatchNorm, norm.Domains, nn.BatchNorm2d]:
    torch.manual_seed(0)
    ordinary = nn.BatchNorm2d(3)
    nn.init.normal_(ordinary.weight)
    nn.init.normal_(ordinary.bias)
    ordinary(torch.randn(8, 3, 4, 4) * 2 + 1)
    domains = norm.Domains(mode=mode)
    return norm.DomainBatchNorm(ordinary, domains), domains, ordinary


def test_mixed_is_an_ordinary_batch_norm() -> None:
    layer, domains, ordinary = _layer("mixed")
    domains.num_source = 3
    x = torch.randn(8, 3, 5, 5)
    assert torch.allclose(layer(x), ordinary(x), atol=1e-6)
    layer.eval(), ordinary.eval()
    domains.num_source = None
    for domain in (norm.SOURCE, norm.TARGET):
        domains.whole_batch = domain
        assert torch.allclose(layer(x), ordinary(x), atol=1e-6)


@pytest.mark.parametrize("mode", ["per_domain", "dsbn"])
def test_each_domain_is_normalised_by_its_own_statistics(mode: norm.Mode) -> None:
    layer, domains, ordinary = _layer(mode)
    domains.num_source = 3
    x = (
        torch.randn(8, 3, 5, 5)
        * torch.cat([torch.ones(3), torch.full((5,), 4.0)])[:, None, None, None]
    )
    weight, bias = ordinary.weight.detach(), ordinary.bias.detach()
    expected = torch.cat(
        [references.batch_norm(part, weight, bias, layer.eps) for part in (x[:3], x[3:])]
    )
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_running_statistics_of_a_domain_see_its_rows_alone() -> None:
    layer, domains, ordinary = _layer("per_domain")
    twin = nn.BatchNorm2d(3)
    twin.load_state_dict(ordinary.state_dict())
    x = torch.randn(8, 3, 5, 5)
    domains.num_source = 3
    layer(x)
    ordinary(x[:3]), twin(x[3:])
    assert ordinary.running_mean is not None
    assert twin.running_mean is not None
    assert torch.allclose(
        layer.running_mean_2C, torch.stack([ordinary.running_mean, twin.running_mean])
    )


def test_evaluation_uses_the_stored_statistics_of_the_domain() -> None:
    layer, domains, _ = _layer("per_domain")
    with torch.no_grad():
        layer.running_mean_2C[norm.TARGET] += 1
    layer.eval()
    x = torch.randn(4, 3, 2, 2)
    outputs = {}
    for domain in (norm.SOURCE, norm.TARGET):
        domains.whole_batch = domain
        outputs[domain] = layer(x)
    assert not torch.allclose(outputs[norm.SOURCE], outputs[norm.TARGET])
    shifted = layer(x + 1)  # still target
    assert torch.allclose(shifted, outputs[norm.SOURCE], atol=1e-5)


def test_frozen_never_changes_statistics() -> None:
    layer, _, ordinary = _layer("frozen")
    ordinary.eval()
    before = layer.running_mean_2C.clone()
    x = torch.randn(8, 3, 4, 4)
    assert torch.allclose(layer.train()(x), ordinary(x), atol=1e-6)
    assert torch.equal(layer.running_mean_2C, before)


def test_dsbn_has_affine_parameters_of_each_domain_and_per_domain_shares_them() -> None:
    assert len(_layer("dsbn")[0].weight_SC) == 2
    assert len(_layer("per_domain")[0].weight_SC) == 1
    layer, domains, _ = _layer("dsbn")
    domains.num_source = 3
    layer(torch.randn(8, 3, 4, 4))[:3].sum().backward()
    assert layer.bias_SC.grad is not None
    assert layer.bias_SC.grad[norm.SOURCE].abs().sum() > 0
    assert layer.bias_SC.grad[norm.TARGET].abs().sum() == 0


class _ActNorm(nn.BatchNorm2d):
    """A BatchNorm2d that also activates, like timm's fused layers."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.act(super().forward(x))
        return activated


def test_install_replaces_every_layer_and_keeps_what_is_fused_into_it() -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 3), _ActNorm(4))
    )
    x = torch.randn(6, 3, 9, 9)
    backbone.eval()
    expected = backbone(x)
    assert norm.install(backbone, norm.Domains()) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in backbone.modules())
    assert torch.allclose(backbone.eval()(x), expected, atol=1e-6)
    assert (expected >= 0).all()


def test_target_statistics_are_the_plain_average_over_batches() -> None:
    torch.manual_seed(0)
    domains = norm.Domains(mode="per_domain")
    backbone = nn.Sequential(nn.BatchNorm2d(2))
    norm.install(backbone, domains)
    batches = [torch.randn(16, 2, 3, 3) + i for i in range(4)]
    domains.whole_batch = norm.TARGET
    norm.estimate_target_statistics(backbone, batches, backbone)
    layer = next(norm.domain_layers(backbone))
    assert torch.allclose(
        layer.running_mean_2C[norm.TARGET],
        torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0),
        atol=1e-5,
    )
    assert torch.equal(layer.running_mean_2C[norm.SOURCE], torch.zeros(2))
    assert layer.momentum == 0.1


def test_the_targets_statistics_start_at_the_sources() -> None:
    layer, domains, _ = _layer("dsbn")
    domains.num_source = 8
    layer(torch.randn(8, 3, 4, 4))
    holder = nn.Sequential(layer)
    norm.copy_source_to_target(holder)
    for pair in (layer.running_mean_2C, layer.running_var_2C, layer.weight_SC, layer.bias_SC):
        assert torch.equal(pair[0], pair[1])
    assert replace(domains).apart


def test_a_smaller_last_batch_weighs_less() -> None:
    torch.manual_seed(0)
    domains = norm.Domains(mode="per_domain", whole_batch=norm.TARGET)
    backbone = nn.Sequential(nn.BatchNorm2d(2))
    norm.install(backbone, domains)
    images = torch.randn(10, 2, 3, 3)
    norm.estimate_target_statistics(backbone, [images[:8], images[8:] + 5], backbone)
    expected = (8 * images[:8].mean((0, 2, 3)) + 2 * (images[8:] + 5).mean((0, 2, 3))) / 10
    assert torch.allclose(
        next(norm.domain_layers(backbone)).running_mean_2C[norm.TARGET], expected, atol=1e-5
    )


def _trained(layer: norm.DomainBatchNorm, out: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a step sees of a layer: output, gradients, statistics."""
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    tensors = [
        out,
        x.grad,
        layer.weight_SC.grad,
        layer.bias_SC.grad,
        layer.running_mean_2C,
        layer.running_var_2C,
    ]
    return [tensor.detach() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("mode", ["per_domain", "dsbn"])
def test_the_fused_form_for_halves_is_the_same_function(mode: norm.Mode) -> None:
    found = []
    for fused in (False, True):
        layer, domains, _ = _layer(mode)
        domains.num_source = 4
        torch.manual_seed(1)
        x = (torch.randn(8, 3, 5, 5) * 2 + 3).requires_grad_()
        found.append(_trained(layer, layer.normalise_halves(x) if fused else layer(x), x))
    assert len(found[0]) == 6
    for plain, fused_one in zip(*found, strict=True):
        assert torch.allclose(plain, fused_one, atol=1e-5)


@pytest.mark.parametrize("own_target", [0, 2])
def test_a_process_without_target_rows_uses_the_rows_of_others(
    monkeypatch: pytest.MonkeyPatch, own_target: int
) -> None:
    """Each layer sums over processes twice, whatever its rows; else processes would deadlock."""
    torch.manual_seed(0)
    own, others = (
        torch.randn(4 + own_target, 3, 2, 2),
        {norm.SOURCE: torch.randn(2, 3, 2, 2), norm.TARGET: torch.randn(3, 3, 2, 2)},
    )
    layer = norm.DomainBatchNorm(
        nn.BatchNorm2d(3), norm.Domains(mode="per_domain", num_source=4, synchronised=True)
    ).train()
    asked: list[torch.Tensor] = []

    def with_others(sums: torch.Tensor) -> torch.Tensor:
        rows = others[len(asked)]  # the running mean is 0, so these are the sums of another process
        asked.append(sums)
        count = torch.tensor([rows.numel() / 3])
        return sums + torch.cat([rows.sum(dim=(0, 2, 3)), rows.square().sum(dim=(0, 2, 3)), count])

    monkeypatch.setattr(norm, "_sum_over_processes", with_others)
    found = layer(own)
    assert len(asked) == 2
    assert found.shape == own.shape
    for domain, part in ((norm.SOURCE, own[:4]), (norm.TARGET, own[4:])):
        everything = torch.cat([part, others[domain]])
        mean_C = everything.mean(dim=(0, 2, 3))
        assert torch.allclose(layer.running_mean_2C[domain], 0.1 * mean_C, atol=1e-6)
        assert torch.allclose(
            layer.running_var_2C[domain],
            0.9 + 0.1 * everything.transpose(0, 1).flatten(1).var(dim=1),
            atol=1e-5,
        )


def test_statistics_do_not_move_without_rows_in_any_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretraining passes one domain only."""
    monkeypatch.setattr(norm, "_sum_over_processes", lambda sums: sums)
    layer = norm.DomainBatchNorm(
        nn.BatchNorm2d(3), norm.Domains(mode="dsbn", num_source=4, synchronised=True)
    ).train()
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    layer(x).square().sum().backward()
    assert layer.running_mean_2C[norm.TARGET].tolist() == [0.0] * 3
    assert layer.running_var_2C[norm.TARGET].tolist() == [1.0] * 3
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.weight_SC.grad is not None
    assert layer.weight_SC.grad.isfinite().all()


def test_synchronised_alone_is_an_ordinary_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_sum_over_processes", lambda values: values)
    found = []
    for synchronised in (False, True):
        layer, domains, _ = _layer("mixed")
        domains.synchronised = synchronised
        torch.manual_seed(1)
        x = (torch.randn(8, 3, 5, 5) * 2 + 30).requires_grad_()
        found.append(_trained(layer, layer(x), x))
    for plain, other in zip(*found, strict=True):
        assert torch.allclose(plain, other, atol=1e-4)


def test_a_single_row_of_a_domain_is_normalised_with_what_is_stored() -> None:
    domains = norm.Domains(mode="per_domain", num_source=3)
    layer = norm.DomainBatchNorm(nn.BatchNorm1d(2), domains)
    x = torch.randn(4, 2)
    y = layer(x)
    assert torch.allclose(y[3], x[3] / (1 + 1e-5) ** 0.5)
    assert torch.allclose(y[:3].mean(0), torch.zeros(2), atol=1e-6)
    assert torch.equal(layer.running_mean_2C[norm.TARGET], torch.zeros(2))
    assert not torch.equal(layer.running_mean_2C[norm.SOURCE], torch.zeros(2))
