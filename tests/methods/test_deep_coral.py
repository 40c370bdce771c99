import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from support.methods import make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    common_logits,
    features_of,
    negative_log_likelihood,
)


@pytest.mark.parametrize("layer", ["logits", "features"])
@pytest.mark.parametrize("target_ce", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(layer: str, target_ce: bool) -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        logits = common_logits(weights, features)
        compared = features if layer == "features" else logits
        distance = torch.cov(compared[:8].T) - torch.cov(compared[8:].T)
        rows = 16 if target_ce else 8
        ce = negative_log_likelihood(logits[:rows], batch.labels_N[:rows])
        return ce + 3 * distance.square().sum() / (4 * compared.shape[1] ** 2)

    assert_steps_are(make_method("deep_coral", weight=3.0, layer=layer, target_ce=target_ce), loss)
