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


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        logits = common_logits(weights, features_of(weights, batch.inputs))
        p = torch.softmax(logits[8:] / 2, 1)
        sure = 1 + torch.exp((p * p.log()).sum(1)).detach()
        sure = sure * 8 / sure.sum()
        confusion = torch.einsum("n,na,nb->ab", sure, p, p)
        confusion = confusion / confusion.sum(1, keepdim=True)
        mcc = (confusion.sum() - confusion.trace()) / 4
        return negative_log_likelihood(logits[:8], batch.labels_N[:8]) + 1.5 * mcc

    assert_steps_are(make_method("mcc", weight=1.5, temperature=2.0), loss)
