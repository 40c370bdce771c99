"""Pseudo-labels of target images, by the model as it is and with stored statistics; over all processes of a team."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from certvol.config import TrainingConfig
from certvol.inference import evaluating, mc_dropout_probabilities, mixed_precision
from certvol.methods.protocol import AdaptationMethod, Labelled, Survey
from certvol.nn.norm import SOURCE, TARGET
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
        return self._walk(cycle, order, needed_C, settings.labelling == "full", between_chunks)

    def label_images(self, cycle: int, images_N: Indices, between_chunks: Callable[[], None]) -> Filed:
        """These and no others."""
        nothing = np.zeros(self.method.network.num_classes, dtype=np.int64)
        return self._walk(cycle, images_N, nothing, True, between_chunks)

    def _walk(
        self, cycle: int, order: Indices, needed_C: Indices, everything: bool, between_chunks: Callable[[], None]
    ) -> Filed:
        def label_chunk(chunk_N: Indices, number: int) -> Callable[[], Indices]:
            """Each process labels its share of the chunk; all file the whole of it."""
            between_chunks()
            share_N = chunk_N[self.team.share(len(chunk_N))]
            labels_N = (
                self._seen(share_N, cycle, number)[0].argmax(dim=1) if len(share_N) > 0 else torch.empty(0).long()
            )
            return lambda: np.asarray(self.team.gather(labels_N.cpu().numpy()))

        return file_by_label(label_chunk, order, needed_C, self.batch_size * self.team.size, everything)

    def _seen(self, images_N: Indices, cycle: int, number: int) -> tuple[Tensor, Tensor]:
        """What the model makes of some target images: probabilities and features, on the training device."""
        settings, place, method = self.settings, (cycle, number, self.team.rank), self.method
        augmented = settings.label_view == "augmented"
        generator = torch_generator("cpu", settings.seed, "label.view", *place) if augmented else None
        view_NCHW = self.views.target_view(images_N, generator)
        with evaluating(method, TARGET), mixed_precision(self.views.device, self.bf16):
            features_ND = method.network.features(view_NCHW)
            if settings.pseudo_labels == "argmax":
                probabilities_NC = method.logits(features_ND).float().softmax(dim=1)
            else:
                seed = torch_seed(settings.seed, "label.dropout", *place)
                probabilities_NC = mc_dropout_probabilities(
                    method, features_ND, settings.mc_passes, settings.mc_dropout, seed
                )
            return probabilities_NC, features_ND.float()

    # --- all target images at once -------------------------------------------------------------------------------------

    def survey(self, cycle: int, stage: int, source: list[Indices], between_chunks: Callable[[], None]) -> Survey:
        """`source`: images of each class, for a method that asks for their centres."""
        device, num_classes = self.views.device, self.method.network.num_classes
        features, probabilities = [], []
        for number, chunk_N in enumerate(self._chunks(np.arange(len(self.views.target)))):
            between_chunks()
            share_N = chunk_N[self.team.share(len(chunk_N))]
            if len(share_N) > 0:
                probabilities_NC, features_ND = self._seen(share_N, cycle, number)
            else:
                probabilities_NC = torch.empty(0, num_classes, device=device)
                features_ND = torch.empty(0, self.method.network.info.dim, device=device)
            features.append(self._gathered(features_ND))
            probabilities.append(self._gathered(probabilities_NC))
        centres_CD = self._source_centres(source, between_chunks) if self.method.surveys_source else None
        generator = torch_generator(device, self.settings.seed, "survey", cycle)
        return Survey(torch.cat(features), torch.cat(probabilities), centres_CD, stage, generator)

    def _chunks(self, images_N: Indices) -> Iterator[Indices]:
        size = self.batch_size * self.team.size
        return (images_N[start : start + size] for start in range(0, len(images_N), size))

    def _gathered(self, rows: Tensor) -> Tensor:
        if self.team.size == 1:
            return rows.clone()  # made in inference mode: such tensors do not train
        return torch.from_numpy(np.asarray(self.team.gather(rows.cpu().numpy()))).to(self.views.device)

    def _source_centres(self, source: list[Indices], between_chunks: Callable[[], None]) -> Tensor:
        device, network = self.views.device, self.method.network
        images_N = np.concatenate(source)
        labels_N = np.repeat(np.arange(len(source)), [len(pool) for pool in source])
        sums_CD = torch.zeros(len(source), network.info.dim, device=device)
        for chunk_N in self._chunks(np.arange(len(images_N))):
            between_chunks()
            share_N = chunk_N[self.team.share(len(chunk_N))]
            if len(share_N) == 0:
                continue
            with evaluating(self.method, SOURCE), mixed_precision(device, self.bf16):
                (view_NCHW,) = self.views.test_batches(SOURCE, images_N[share_N], len(share_N))
                units_ND = F.normalize(network.features(view_NCHW).float(), dim=1)
                sums_CD.index_add_(0, torch.from_numpy(labels_N[share_N]).to(device), units_ND)
        if self.team.size == 1:
            return sums_CD
        parts_RCD = torch.from_numpy(np.asarray(self.team.gather(sums_CD[None].cpu().numpy())))
        return parts_RCD.sum(dim=0).to(device)

    def by_method(self, survey: Survey) -> Labelled:
        """What the method makes of the survey: the same in every process."""
        with evaluating(self.method, TARGET):
            found = self.method.label_target(survey)
        # Copies, as what was made in inference mode does not train.
        labelled = Labelled(found.labels_N.clone(), {name: table.clone() for name, table in found.tables.items()})
        notes = [
            tensor for name, tensor in self.method.named_buffers() if not name.startswith(("network.", "teacher."))
        ]
        self.team.copy_from_main([labelled.labels_N, *labelled.tables.values(), *notes])
        return labelled
