"""Measures of certainty: worked values, then the plain loop, then the classifier's own dropout."""

import math

import pytest
import torch
from torch import Tensor

import references
from certvol import uncertainty
from certvol.nn.heads import Classifier
from certvol.uncertainty import Masks, dropout_masks, mc_dropout

LOGITS = torch.tensor([[1.0, 4.0, 2.0], [0.0, 0.0, 0.0], [-1.0, -3.0, -1.5]])


def layers_of(classifier: Classifier) -> list[tuple[Tensor, Tensor]]:
    return [(x.weight.detach(), x.bias.detach()) for x in (classifier.hidden, classifier.output) if x is not None]


def random_case(num_layers: int, images: int = 9) -> tuple[Tensor, Classifier]:
    torch.manual_seed(num_layers)
    classifier = Classifier(6, 4, num_layers).eval()
    for parameter in classifier.parameters():
        torch.nn.init.normal_(parameter)
    return torch.randn(images, 6), classifier


def test_logits_by_hand() -> None:
    assert uncertainty.top_logit(LOGITS).tolist() == [4, 0, -1]
    assert uncertainty.true_logit(LOGITS, torch.tensor([2, 0, 1])).tolist() == [2, 0, -3]
    assert uncertainty.top_two_difference(LOGITS).tolist() == [2, 0, 0.5]


def test_probability_and_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    assert uncertainty.top_probability(logits).tolist() == pytest.approx([0.5, 1 / 3])
    assert uncertainty.entropy(logits).tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


def test_entropy_of_a_sure_image_is_zero_and_not_minus_zero() -> None:
    entropy = uncertainty.entropy(torch.tensor([[2000.0, 0.0], [float("inf"), 0.0]]))[0]
    assert math.copysign(1, float(entropy)) == 1
    assert float(entropy) == 0


def test_half_precision_is_computed_in_full() -> None:
    logits = torch.tensor([[8.0, 7.0, 1.0]], dtype=torch.bfloat16)
    for measure in (uncertainty.entropy, uncertainty.top_probability, uncertainty.top_two_difference):
        assert measure(logits).dtype == torch.float32
        assert float(measure(logits)) == pytest.approx(float(measure(logits.float())), abs=0)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("passes", [1, 2, 7])
def test_mc_dropout_equals_the_plain_loop(num_layers: int, passes: int) -> None:
    features, classifier = random_case(num_layers)
    layers = layers_of(classifier)
    masks = dropout_masks(layers, passes, 0.6, seed=3)
    found = mc_dropout(features, layers, masks)
    mean, deviation = references.mc_dropout(features, layers, masks)
    assert found.mean_N.tolist() == pytest.approx(mean, abs=1e-6)
    assert found.deviation_N.tolist() == pytest.approx(deviation, abs=1e-6)
    assert (found.deviation_N > 0).any() == (passes > 1)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_mc_dropout_without_dropout_is_the_classifier(num_layers: int) -> None:
    features, classifier = random_case(num_layers)
    layers = layers_of(classifier)
    found = mc_dropout(features, layers, dropout_masks(layers, 5, 0.0, seed=0))
    expected = classifier(features).softmax(dim=1).amax(dim=1)
    assert torch.allclose(found.mean_N, expected, atol=1e-6)
    assert (found.deviation_N < 1e-6).all()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_mc_dropout_is_distributed_as_the_classifiers_own(num_layers: int) -> None:
    """Over many passes, mean and deviation of shared masks and of a mask per image come to the same."""
    features, classifier = random_case(num_layers, images=4)
    layers = layers_of(classifier)
    found = mc_dropout(features, layers, dropout_masks(layers, 20_000, 0.5, seed=1))
    torch.manual_seed(5)
    with torch.no_grad():
        drawn = torch.stack([classifier(features, dropout=0.5).softmax(dim=1) for _ in range(4000)])
    winner = drawn.mean(dim=0).argmax(dim=1)
    rows = torch.arange(len(features))
    assert torch.allclose(found.mean_N, drawn.mean(dim=0)[rows, winner], atol=0.03)
    assert torch.allclose(found.deviation_N, drawn.std(dim=0)[rows, winner], atol=0.03)


def test_an_image_gets_the_same_figures_in_any_batch() -> None:
    features, classifier = random_case(2)
    layers = layers_of(classifier)
    masks = dropout_masks(layers, 6, 0.5, seed=2)
    whole = mc_dropout(features, layers, masks)
    alone = mc_dropout(features[4:5], layers, masks)
    assert float(alone.mean_N) == pytest.approx(float(whole.mean_N[4]), abs=1e-6)
    assert float(alone.deviation_N) == pytest.approx(float(whole.deviation_N[4]), abs=1e-6)


def test_masks_keep_the_right_share_and_the_mean() -> None:
    _, classifier = random_case(2)
    masks = dropout_masks(layers_of(classifier), 5000, 0.85, seed=0)
    assert masks.hidden_PD is not None
    for mask in (masks.inputs_PD, masks.hidden_PD):
        assert float((mask > 0).float().mean()) == pytest.approx(0.15, abs=0.01)
        assert float(mask.mean()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(masks.inputs_PD, masks.hidden_PD)
    again = dropout_masks(layers_of(classifier), 5000, 0.85, seed=0)
    assert isinstance(again, Masks)
    assert torch.equal(masks.inputs_PD, again.inputs_PD)


@pytest.mark.parametrize(("passes", "dropout"), [(0, 0.5), (3, 1.0), (3, -0.1)])
def test_masks_that_cannot_be_are_refused(passes: int, dropout: float) -> None:
    with pytest.raises(ValueError, match="MC-dropout"):
        dropout_masks([(torch.zeros(2, 3), torch.zeros(2))], passes, dropout, 0)


def test_every_measure_points_one_way() -> None:
    """A sure image beside a doubtful one: turned by the table, every measure calls the sure one more certain."""
    logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 0.9, 0.8]])
    values = {
        "probability": uncertainty.top_probability(logits),
        "entropy": uncertainty.entropy(logits),
        "logit": uncertainty.top_logit(logits),
        "logit_gt": uncertainty.true_logit(logits, torch.tensor([0, 0])),
        "logit_diff": uncertainty.top_two_difference(logits),
    }
    layers = [(torch.eye(3), torch.zeros(3))]
    values["mcd_mu"], values["mcd_sigma"] = mc_dropout(logits * 100, layers, dropout_masks(layers, 200, 0.05, 0))
    for name, (sure, doubtful) in values.items():
        assert (sure > doubtful) == uncertainty.MEASURES[name].more_is_certain, name
    assert set(uncertainty.MEASURES) - set(values) == {"sigma"}
    assert set(uncertainty.MEASURES) - set(uncertainty.LABEL_FREE) == {"logit_gt"}
