"""Methods that learn from unlabelled target images look at this cycle's pseudo-labels only where `target_ce` asks for it."""

import dataclasses

import pytest
import torch

from methods.test_contract import METHODS, make_batch, make_method

OPTIONAL = [
    name for name, method in METHODS.items() if "target_ce" in {f.name for f in dataclasses.fields(method.Config)}
]


def test_there_are_such_methods() -> None:
    assert {"deep_coral", "mcc"} <= set(OPTIONAL)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("name", OPTIONAL)
def test_pseudo_labels_matter_only_where_asked_for(name: str, asked: bool) -> None:
    assert METHODS[name].Config().target_ce is False
    values = []
    for target_label in (0, 1):
        method = make_method(name, target_ce=asked).train()
        batch = make_batch()
        batch.labels_N[batch.num_source :] = target_label
        torch.manual_seed(0)
        values.append(method.loss(method.loss_terms(batch)).item())
    assert (values[0] == values[1]) is not asked
