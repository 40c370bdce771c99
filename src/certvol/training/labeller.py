"""Pseudo-labels of target images, by the model as it is and with stored statistics; over all processes of a team."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from certvol.config import TrainingConfig
from certvol.inference import mc_dropout_probabilities, run_batches
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.norm import TARGET
from certvol.seeding import numpy_generator, torch_generator, torch_seed
from certvol.training.distributed import Team
from certvol.training.pseudo_labels import Filed, file_by_label
from certvol.training.views import Batches

Indices = NDArray[np.int64]


class Labeller:
    """`batch_size`: images that one process labels at a time."""

    def __init__(
        self,
        method: AdaptationMethod,
        views: Batches,
        settings: TrainingConfig,
        team: Team,
        bf16: bool,
        batch_size: int,
    ) -> None:
        self.method, self.views, self.settings, self.team = method, views, settings, team
        self.bf16, self.batch_size = bf16, batch_size

    def label(self, cycle: int, needed_C: Indices, between_chunks: Callable[[], None]) -> Filed:
        """Walks the target in an order of this cycle's own, until each class has the images it needs."""
        settings = self.settings
        order = numpy_generator(settings.seed, "label.order", cycle).permutation(len(self.views.target))
        order = order[: math.ceil(settings.labelling_share * len(order))]
        everything = settings.labelling == "full" or self.method.labels_whole_target

        def label_chunk(chunk_N: Indices, number: int) -> Indices:
            """Each process labels its share of the chunk; all file the whole of it."""
            between_chunks()
            share = self._label_share(chunk_N[self.team.share(len(chunk_N))], cycle, number)
            return np.asarray(self.team.gather(share))

        return file_by_label(label_chunk, order, needed_C, self.batch_size * self.team.size, everything)

    def _label_share(self, images_N: Indices, cycle: int, number: int) -> Indices:
        settings, place = self.settings, (cycle, number, self.team.rank)
        if len(images_N) == 0:
            return images_N
        augmented = settings.label_view == "augmented"
        generator = torch_generator("cpu", settings.seed, "label.view", *place) if augmented else None
        view = iter([self.views.target_view(images_N, generator)])
        if settings.pseudo_labels == "argmax":
            return run_batches(self.method, view, TARGET, self.bf16).labels_N
        seed = torch_seed(settings.seed, "label.dropout", *place)

        def head(features_ND: Tensor, _: int) -> Tensor:
            return mc_dropout_probabilities(self.method, features_ND, settings.mc_passes, settings.mc_dropout, seed)

        return run_batches(self.method, view, TARGET, self.bf16, head).labels_N
