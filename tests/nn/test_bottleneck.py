import torch
from torch import nn

from certvol.config import ModelConfig
from certvol.nn import bottleneck
from certvol.nn.network import Network, seeded_backbone


def _network(width: int, **model: object) -> Network:
    config = ModelConfig(backbone="small_cnn", **{"norm": "mixed", **model})  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = Network(*seeded_backbone(config, 16, 0), 5, config)
    bottleneck.install(network, width)
    return network


def test_a_bottleneck_is_linear_batch_norm_and_relu_then_a_linear_classifier() -> None:
    network = _network(7, dropout=0.0).train()
    images = torch.randn(6, 3, 16, 16)
    rows, logits = bottleneck.compared_rows(network, images)
    layer = network.classifier.bottleneck.linear
    expected = torch.relu(nn.BatchNorm1d(7)(network.features(images) @ layer.weight.T + layer.bias))
    assert torch.allclose(rows, expected, atol=1e-5)
    assert torch.allclose(logits, network.classifier.output(expected), atol=1e-5)


def test_without_width_the_common_classifier_stays() -> None:
    network = _network(0).eval()
    assert network.classifier.hidden is not None
    images = torch.randn(6, 3, 16, 16)
    rows, logits = bottleneck.compared_rows(network, images)
    assert torch.equal(rows, network.features(images))
    assert torch.equal(logits, network.classifier(rows))


def test_classifying_features_goes_through_the_bottleneck_with_stored_statistics_and_dropout_on_demand() -> None:
    network = _network(7).eval()
    features = torch.randn(6, network.info.dim)
    logits = network.classifier(features)
    assert torch.allclose(logits[:1], network.classifier(features[:1]), atol=1e-6)
    torch.manual_seed(0)
    assert not torch.equal(network.classifier(features, dropout=0.5), logits)
    assert torch.equal(network.classifier(features, dropout=0.0), logits)


def test_the_bottleneck_keeps_the_domains_apart_where_the_backbone_does() -> None:
    network = _network(7, norm="per_domain", dropout=0.0).train()
    with network.rows_of(num_source=4):
        bottleneck.compared_rows(network, torch.randn(8, 3, 16, 16))
    means = network.classifier.bottleneck.norm.running_mean_2C
    assert not torch.allclose(means[0], means[1])


def test_weights_are_saved_once() -> None:
    names = [name for name in _network(7).state_dict() if name.endswith("output.weight")]
    assert names == ["classifier.output.weight"]
