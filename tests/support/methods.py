"""Small networks, batches and surveys for tests of methods."""

import dataclasses
from typing import Any

import torch

from certvol.methods import discover
from certvol.methods._base import AdaptationMethod, Batch, Survey
from certvol.nn.network import Network, seeded_backbone
from certvol.settings import ModelConfig

METHODS = discover()
CLASSES = 4


def make_method(name: str, **settings: Any) -> Any:
    """Make a method on the small CNN; typed Any because tests use what only one method has."""
    config = ModelConfig(backbone="small_cnn", norm="mixed")
    backbone, info = seeded_backbone(config, 16, 0)
    torch.manual_seed(0)
    return METHODS[name](Network(backbone, info, CLASSES, config), METHODS[name].Config(**settings))


def make_batch(adapting: bool = True, seed: int = 0, n: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        inputs=torch.randn(n, 3, 16, 16, generator=generator),
        labels_N=torch.arange(n) % CLASSES,
        num_source=n // 2 if adapting else n,
        rows=torch.arange(n),
        total=n,
        generator=torch.Generator().manual_seed(seed),
        progress=torch.tensor(0.5),
        adapting=adapting,
    )


def make_survey(method: AdaptationMethod, n: int, seed: int = 0, stage: int = 1) -> Survey:
    """Survey `n` target images with random features."""
    generator = torch.Generator().manual_seed(seed)
    features_ND = torch.randn(n, method.network.info.dim, generator=generator).relu()
    with torch.no_grad():
        probabilities_NC = method.eval().logits(features_ND).softmax(dim=1)
    centres_CD = (
        torch.rand(CLASSES, method.network.info.dim, generator=generator)
        if method.surveys_source
        else None
    )
    return Survey(features_ND, probabilities_NC, centres_CD, stage, generator)


def fitted(method: AdaptationMethod, batch: Batch, seed: int = 0) -> Batch:
    """Add what the trainer adds for this method: a second view and the rows of its tables."""
    if not batch.adapting:
        return batch
    training = method.training
    tables = {}
    if method.labels_whole_target:
        with torch.no_grad():
            noted = method.label_target(make_survey(method, 64, seed)).tables
        tables = {
            name: table[: len(batch.labels_N) - batch.num_source] for name, table in noted.items()
        }
    method.train(training)
    generator = torch.Generator().manual_seed(seed + 1)
    other = (
        torch.randn(batch.inputs.shape, generator=generator)
        if method.views_per_image == 2
        else None
    )
    return dataclasses.replace(batch, tables=tables, other_inputs=other)
