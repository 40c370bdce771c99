import pytest
import torch
from torch import Tensor, nn

from certvol.methods import dan
from certvol.methods._base import Batch
from certvol.methods._domain_loss import Bottleneck, BottleneckMethod, DomainLossMethod
from certvol.nn.network import Network, seeded_backbone
from certvol.settings import ModelConfig
from support.methods import METHODS, make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    bottleneck_of,
    common_logits,
    features_of,
    linear,
    negative_log_likelihood,
)

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def _method(width: int, **model: object) -> dan.Method:
    config = ModelConfig(backbone="small_cnn", **{"norm": "mixed", **model})  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = Network(*seeded_backbone(config, 16, 0), 5, config)
    return dan.Method(network, dan.Method.Config(bottleneck=width))


def test_a_bottleneck_is_linear_batch_norm_and_relu_then_a_linear_classifier() -> None:
    method = _method(7, dropout=0.0).train()
    rows, logits = method.compared(IMAGES)
    layer = method.head.bottleneck.linear
    assert isinstance(layer, nn.Linear)
    linear = method.network.features(IMAGES) @ layer.weight.T + layer.bias
    expected = torch.relu(nn.BatchNorm1d(7)(linear))
    assert torch.allclose(rows, expected, atol=1e-5)
    assert torch.allclose(logits, method.head.output(expected), atol=1e-5)


def test_without_width_the_common_classifier_stays() -> None:
    method = _method(0).eval()
    assert method.head.hidden is not None
    rows, logits = method.compared(IMAGES)
    assert torch.equal(rows, method.network.features(IMAGES))
    assert torch.equal(logits, method.network.classifier(rows))


def test_features_are_classified_through_the_bottleneck_with_stored_statistics() -> None:
    network = _method(7).eval().network
    features = torch.randn(6, network.info.dim)
    logits = network.classifier(features)
    assert torch.allclose(logits[:1], network.classifier(features[:1]), atol=1e-6)
    assert not torch.equal(network.classifier(features, nn.Dropout(0.5)), logits)
    assert torch.equal(network.classifier(features, nn.Identity()), logits)


def test_the_bottleneck_has_the_norm_mode_of_the_backbone() -> None:
    method = _method(7, norm="per_domain", dropout=0.0).train()
    with method.network.rows_of(num_source=4):
        method.compared(IMAGES)
    assert isinstance(method.head.bottleneck, Bottleneck)
    means = method.head.bottleneck.norm.running_mean_2C
    assert not torch.allclose(means[0], means[1])


def test_weights_are_saved_once() -> None:
    names = [name for name in _method(7).state_dict() if name.endswith("output.weight")]
    assert names == ["network.classifier.output.weight"]


# SimNet classifies by similarity to prototypes; test_simnet.py repeats its pretraining.
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in METHODS.items()
        if issubclass(kind, DomainLossMethod) and name != "simnet"
    ],
)
def test_pretraining_is_cross_entropy_alone_and_leaves_other_networks_as_they_are(
    name: str,
) -> None:
    behind_bottleneck = issubclass(METHODS[name], BottleneckMethod)

    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        if behind_bottleneck:
            rows = bottleneck_of(weights, features)
            if "network.classifier.hidden.weight" in weights:
                rows = torch.relu(linear(weights, "network.classifier.hidden", rows))
            logits = linear(weights, "network.classifier.output", rows)
        else:
            logits = common_logits(weights, features)
        return negative_log_likelihood(logits, batch.labels_N)

    settings = {"bottleneck": 12} if behind_bottleneck else {}
    assert_steps_are(make_method(name, **settings), loss, adapting=False)
