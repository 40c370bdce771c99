import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import score_references as references
from certvol.nn.heads import Classifier
from certvol.scores.oscillation import oscillation_between, pick_per_class

Layers = list[tuple[Tensor, Tensor]]


def random_case(
    num_layers: int, num_features: int = 7, num_classes: int = 6, dim: int = 5
) -> tuple[Tensor, Layers]:
    """Draw large weights and few units, for many changes on a segment."""
    generator = torch.Generator().manual_seed(num_layers)
    features = 3 * torch.randn(num_features, dim, generator=generator)
    sizes = [dim] * num_layers + [num_classes]
    layers = [
        (torch.randn(after, before, generator=generator), torch.randn(after, generator=generator))
        for before, after in itertools.pairwise(sizes)
    ]
    return features, layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_points", [2, 3, 7, 29, 30, 31, 77, 100_000])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_oscillation_equals_the_naive_loop(
    num_layers: int, chunk_points: int, dtype: torch.dtype
) -> None:
    features, layers = random_case(num_layers)
    features = features.to(dtype)
    layers = [(weight.to(dtype), bias.to(dtype)) for weight, bias in layers]
    found = oscillation_between(features, layers, num_points=30, chunk_points=chunk_points)
    assert found == references.oscillation(features, layers, 30)
    assert found.total > found.floor > 0


@pytest.mark.parametrize("num_layers", [1, 2])
def test_oscillation_is_that_of_the_classifier_of_a_run(num_layers: int) -> None:
    torch.manual_seed(0)
    head = Classifier(4, 5, num_layers).eval()
    features, share = 5 * torch.randn(6, 4), torch.linspace(0, 1, 101)[:, None]
    changes = 0
    for one, other in itertools.combinations(features, 2):
        predicted = head(torch.lerp(one, other, share)).argmax(1)
        changes += int((predicted[1:] != predicted[:-1]).sum())
    layers = [
        (linear.weight, linear.bias) for linear in (head.hidden, head.output) if linear is not None
    ]
    assert changes > 0
    assert oscillation_between(features, layers, num_points=101).total == changes / 101


def test_one_layer_and_one_class_never_changes() -> None:
    features, layers = random_case(1, num_features=200)
    weight, bias = layers[0]
    predicted = (features @ weight.T + bias).argmax(1)
    of_one_class = features[predicted == predicted.mode().values]
    assert len(of_one_class) > 10
    assert oscillation_between(of_one_class, layers, num_points=200) == (0, 0)


def test_one_layer_and_two_classes_change_once_if_the_ends_differ() -> None:
    features, layers = random_case(1, num_features=40, num_classes=2)
    weight, bias = layers[0]
    ones = int((features @ weight.T + bias).argmax(1).sum())
    assert 0 < ones < 40
    expected = ones * (40 - ones) / 50
    assert oscillation_between(features, layers, num_points=50) == (expected, expected)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_identical_features_never_change(num_layers: int) -> None:
    features, layers = random_case(num_layers)
    assert oscillation_between(features[:1].expand(9, -1), layers, num_points=100) == (0, 0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_than_two_features_have_no_pair(num_layers: int) -> None:
    features, layers = random_case(num_layers)
    assert oscillation_between(features[:1], layers) == (0, 0)
    assert oscillation_between(features[:0], layers) == (0, 0)


def zigzag(turns: int) -> Layers:
    """Build a classifier of [0, turns] whose class changes at every half.

    Class 0 has logit 0; that of class 1 goes -1/2, 1/2, -1/2, ... at 0, 1, 2, ...
    """
    hidden = torch.ones(turns, 1), -torch.arange(turns).float()
    slopes = torch.tensor([1.0] + [2.0 * (-1) ** turn for turn in range(1, turns)])
    return [hidden, (torch.stack([torch.zeros(turns), slopes]), torch.tensor([0, -0.5]))]


@pytest.mark.parametrize("turns", [1, 2, 5, 8])
@pytest.mark.parametrize("chunk_points", [2, 5, 1000])
def test_two_layers_by_hand(turns: int, chunk_points: int) -> None:
    ends = torch.tensor([[0.0], [turns]])
    found = oscillation_between(
        ends, zigzag(turns), num_points=10 * turns, chunk_points=chunk_points
    )
    assert found.total == pytest.approx(turns / (10 * turns))
    assert found.floor == pytest.approx(turns % 2 / (10 * turns))


def test_two_points_per_segment_are_its_ends() -> None:
    features, layers = random_case(2, num_features=30)
    found = oscillation_between(features, layers, num_points=2, chunk_points=5)
    assert found.total == found.floor > 0
    assert found == references.oscillation(features, layers, 2)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_neither_chunks_nor_the_order_of_features_matter(num_layers: int) -> None:
    features, layers = random_case(num_layers, num_features=25)
    expected = oscillation_between(features, layers, num_points=200)
    for chunk_points in (2, 13, 199, 200, 201, 999):
        assert (
            oscillation_between(features, layers, num_points=200, chunk_points=chunk_points)
            == expected
        )
    for seed in range(5):
        order = torch.randperm(25, generator=torch.Generator().manual_seed(seed))
        assert oscillation_between(features[order], layers, num_points=200) == expected


def test_precision_allowed_for_training_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    features, layers = random_case(2, num_features=20)
    expected = oscillation_between(features, layers)
    # A CPU may ignore the setting, so read it while the products are computed.
    addmm, during = torch.addmm, set()

    def watched(*args: Tensor, out: Tensor | None = None) -> Tensor:
        during.add(torch.get_float32_matmul_precision())
        return addmm(*args) if out is None else addmm(*args, out=out)

    monkeypatch.setattr(torch, "addmm", watched)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert oscillation_between(features, layers) == expected
        assert during == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_features_in_bfloat16_are_computed_in_float32() -> None:
    features, layers = random_case(2, num_features=20)
    rounded = features.bfloat16()
    assert oscillation_between(rounded, layers) == oscillation_between(rounded.float(), layers)


def test_inputs_stay_as_they_are_and_no_gradient_is_kept() -> None:
    features, layers = random_case(2)
    copies = [features.clone(), *(tensor.clone() for layer in layers for tensor in layer)]
    for weight, _ in layers:
        weight.requires_grad_()
    oscillation_between(features.requires_grad_(), layers, num_points=10)
    tensors = [features, *(tensor for layer in layers for tensor in layer)]
    assert all(torch.equal(before, after) for before, after in zip(copies, tensors, strict=True))


def test_invalid_inputs_are_refused() -> None:
    features, layers = random_case(2)
    with pytest.raises(ValueError, match="one or two linear layers, found 3"):
        oscillation_between(features, [*layers, layers[0]])
    with pytest.raises(ValueError, match="at least 2"):
        oscillation_between(features, layers, num_points=1)
    features[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        oscillation_between(features, layers)


def test_pick_per_class_draws_up_to_the_number_from_every_class() -> None:
    labels = np.array([0] * 20 + [2] * 3 + [5] * 5 + [7] * 9)
    np.random.default_rng(1).shuffle(labels)
    picked = pick_per_class(labels, 5, seed=0)
    assert np.bincount(labels[picked]).tolist() == [5, 0, 3, 0, 0, 5, 0, 5]
    assert np.array_equal(picked, np.unique(picked))
    assert np.array_equal(picked, pick_per_class(labels, 5, seed=0))
    assert not np.array_equal(picked, pick_per_class(labels, 5, seed=1))
    assert len(pick_per_class(labels[:0], 5, seed=0)) == 0


def test_every_image_of_a_class_is_equally_likely_to_be_picked() -> None:
    labels = np.repeat([0, 1], 10)
    counts = np.zeros(20)
    for seed in range(2000):
        counts[pick_per_class(labels, 5, seed)] += 1
    assert np.abs(counts / 2000 - 0.5).max() < 0.05
