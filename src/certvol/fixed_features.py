"""Which settings follow from a method in closed form; the same for a run and for what a benchmark plans."""

from dataclasses import replace

from certvol import methods
from certvol.config import Config
from certvol.nn.backbones import has_pretrained_weights


def settled(config: Config) -> Config:
    """A method in closed form works on features as they are: of pretrained weights, which stay; else of those that pretraining
    makes, by `model.train` as it is. It has no adapter, and no cycles in which to try modes of normalisation."""
    if not methods.discover()[config.method_name].closed_form:
        return config
    model = replace(config.model, adapter=False)
    if has_pretrained_weights(model.backbone, model.weights):
        return replace(config, model=replace(model, train="head"))
    return replace(config, model=replace(model, norm="mixed" if model.norm == "auto" else model.norm))
