"""The features of a frozen backbone, in fewer dimensions: a step then costs a fraction.

The directions are the principal ones of both domains, found without labels. The map is part of the
network, so whoever predicts or exports gives it the features as they come from the backbone.
"""

from collections.abc import Sequence
from dataclasses import replace

from certvol.distributed import Team
from certvol.errors import RunFailed
from certvol.methods._base import AdaptationMethod
from certvol.nn.projection import Features, fit_projection
from certvol.randomness import torch_generator
from certvol.runs.checkpoint import read_tensors, write_tensors
from certvol.runs.folder import RunFolder
from certvol.settings import Config

AUTO_DIMS = 512


def with_feature_dims(config: Config, dim: int, images: int, closed_form: bool) -> Config:
    """Settle how many dimensions features are reduced to; 0 if they stay as they are.

    `images` of both domains lie in a space of at most so many dimensions less one.
    """
    asked = config.model.feature_dims
    if config.model.train != "head":
        asked = 0
    elif asked is None:
        asked = 0 if closed_form else AUTO_DIMS
    dims = min(asked, images - 1) if asked < dim else 0
    return replace(config, model=replace(config.model, feature_dims=dims))


def project_features(
    run: RunFolder, method: AdaptationMethod, found: Sequence[Features], team: Team
) -> list[Features]:
    """Set the network's projection, if it has one, and return the features behind it.

    A resumed run reads the projection that it began with: another machine may find other axes.
    """
    projection = method.network.projection
    if projection is None:
        return list(found)
    if team.main:
        place = run.projection
        if place.exists():
            tensors = read_tensors(place)
        else:
            tensors = fit_projection(found, method.network.dim, torch_generator("cpu", 0, "axes"))
            place.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(place, tensors)
        try:
            projection.load_state_dict(tensors)
        except RuntimeError:
            raise RunFailed(f"{place} does not fit this run's features; start a new run") from None
    team.copy_from_main([projection.mean_D, projection.basis_DR])
    if method.teacher is not None:
        method.teacher.start()
    return [(projection.project(features), rows) for features, rows in found]
