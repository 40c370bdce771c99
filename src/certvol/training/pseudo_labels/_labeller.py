"""Label target images with a rule and the model in evaluation. All processes share the work."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.data import Indices
from certvol.data.reviewed import ReviewedLabels
from certvol.data.target_prior import ABSENT
from certvol.data.views import Views
from certvol.device import evaluation_batch
from certvol.distributed import Team
from certvol.methods._base import AdaptationMethod, Labelled, Survey
from certvol.nn.acceleration import uses_bf16
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict.forward import evaluating, mixed_precision
from certvol.randomness import numpy_generator, torch_generator, torch_seed
from certvol.settings import TrainingConfig
from certvol.training.pseudo_labels._base import Chunk, PseudoLabelRule
from certvol.training.pseudo_labels._pools import Pools, fill_pools

BetweenChunks = Callable[[], None]


class Labeller:
    """Labels target images for a cycle: as many as it draws, or all of them."""

    def __init__(
        self,
        method: AdaptationMethod,
        views: Views,
        settings: TrainingConfig,
        team: Team,
        rule: PseudoLabelRule,
        reviewed: ReviewedLabels | None = None,
    ) -> None:
        self.method, self.views, self.settings, self.team = method, views, settings, team
        self.rule, self.reviewed = rule, reviewed
        self.bf16 = uses_bf16(settings, method.network, views.device)
        frozen = method.network.trained_part == "head" and method.network.adapter is None
        self.fixed_features = frozen and settings.label_view == "test"
        self.chunk_size = evaluation_batch(views.device) * team.size

    @property
    def labels_whole_target(self) -> bool:
        return self.method.labels_whole_target or self.rule.labels_whole_target

    @property
    def rule_compares(self) -> bool:
        """True if labels come from comparing target images with each other."""
        return self.rule.labels_whole_target and not self.method.labels_whole_target

    def label(self, cycle: int, needed_C: Indices, between_chunks: BetweenChunks) -> Pools:
        """Label the target in this cycle's own random order, until each class has enough images."""
        full = self.settings.labelling == "full"
        return self._fill_pools(cycle, self._order(cycle), needed_C, full, between_chunks)

    def label_some(self, cycle: int, count: int, between_chunks: BetweenChunks) -> Pools:
        """Label `count` random images of the target, or all with `training.labelling full`."""
        order = self._order(cycle)
        images_N = order if self.settings.labelling == "full" else order[:count]
        return self.label_images(cycle, images_N, between_chunks)

    def _order(self, cycle: int) -> Indices:
        settings, count = self.settings, len(self.views.target)
        order = numpy_generator(settings.seed, "label.order", cycle).permutation(count)
        return np.asarray(order[: math.ceil(settings.labelling_share * count)])

    def label_images(self, cycle: int, images_N: Indices, between_chunks: BetweenChunks) -> Pools:
        """Label these images only."""
        nothing = np.zeros(self.method.network.num_classes, dtype=np.int64)
        return self._fill_pools(cycle, images_N, nothing, True, between_chunks)

    def _fill_pools(
        self,
        cycle: int,
        order: Indices,
        needed_C: Indices,
        everything: bool,
        between_chunks: BetweenChunks,
    ) -> Pools:
        def label_chunk(chunk_N: Indices, number: int) -> Callable[[], Indices]:
            """Label this process's share of a chunk, and return the labels of the whole chunk."""
            between_chunks()
            probabilities_NC, _ = self._predict(chunk_N, cycle, number)
            labels_N = self.rule.labels(probabilities_NC)
            return lambda: self._corrected(
                chunk_N, np.asarray(self.team.gather(labels_N.cpu().numpy()))
            )

        return fill_pools(label_chunk, order, needed_C, self.chunk_size, everything)

    def _predict(self, chunk_N: Indices, cycle: int, number: int) -> tuple[Tensor, Tensor]:
        """Return probabilities and features of this process's share of a chunk."""
        method, device = self.method, self.views.device
        share_N = chunk_N[self.team.share(len(chunk_N))]
        if len(share_N) == 0:
            network = method.network
            return (
                torch.empty(0, network.num_classes, device=device),
                torch.empty(0, network.dim, device=device),
            )
        seed, place = self.settings.seed, (cycle, number, self.team.rank)
        augmented = self.settings.label_view == "augmented"
        generator = torch_generator("cpu", seed, "label.view", *place) if augmented else None
        view = self.views.target_view(share_N, generator)
        with evaluating(method, TARGET), mixed_precision(device, self.bf16):
            features_ND = method.network.features(view)
            chunk = Chunk(method, features_ND, torch_seed(seed, "label.dropout", *place))
            return self.rule.probabilities(chunk), features_ND.float()

    # --- all target images at once

    @property
    def survey_predicts(self) -> bool:
        """True if a survey holds the probabilities that the model predicts."""
        plain = type(self.rule).probabilities is PseudoLabelRule.probabilities
        return self.labels_whole_target and plain and self.settings.label_view == "test"

    def label_target(self, survey: Survey) -> Labelled:
        """Label the whole target, by the method if it does so itself, else by the rule."""
        survey = self._with_reviewed(survey)
        with evaluating(self.method, TARGET):
            if self.method.labels_whole_target:
                found = self.method.label_target(survey)
            else:
                found = Labelled(self.rule.label_target(survey))
        # Tensors made in inference mode cannot train: clone them.
        tables = {name: table.clone() for name, table in found.tables.items()}
        labels_N = self._without_absent(found.labels_N.clone())
        if self.reviewed is not None:
            corrected_N = self._corrected(np.arange(len(labels_N)), labels_N.cpu().numpy())
            labels_N = torch.from_numpy(corrected_N).to(labels_N.device)
        labelled = Labelled(labels_N, tables)
        notes = [
            tensor
            for name, tensor in self.method.named_buffers()
            if not name.startswith(("network.", "teacher."))
        ]
        self.team.copy_from_main([labelled.labels_N, *tables.values(), *notes])
        return labelled

    def _corrected(self, images_N: Indices, labels_N: Indices) -> Indices:
        return labels_N if self.reviewed is None else self.reviewed.correct(images_N, labels_N)

    def _with_reviewed(self, survey: Survey) -> Survey:
        """Make the model sure of reviewed images, so that their neighbours follow their labels."""
        if self.reviewed is None:
            return survey
        probabilities_NC = survey.probabilities_NC.clone()
        images_R, labels_R = self.reviewed.images_R, self.reviewed.labels_R
        probabilities_NC[images_R] = 0
        probabilities_NC[images_R, labels_R] = 1
        return replace(survey, probabilities_NC=probabilities_NC)

    def _without_absent(self, labels_N: Tensor) -> Tensor:
        """Leave out images with a label that the target prior rules out.

        Rules see posteriors under the prior and do not give such labels; some methods may.
        """
        shift_C = self.method.prior_shift_C
        if shift_C is None:
            return labels_N
        absent_N = (shift_C[labels_N.clamp(min=0)] <= ABSENT) & (labels_N >= 0)
        return labels_N.masked_fill(absent_N, -1)

    def survey(
        self, cycle: int, stage: int, source_pools: list[Indices], between_chunks: BetweenChunks
    ) -> Survey:
        """Return features and probabilities of all target images, the same in every process.

        `source_pools` holds the source images of each class; they are used only if the method
        or the rule asks for them.
        """
        features, probabilities = [], []
        for number, chunk_N in enumerate(self._chunks(len(self.views.target))):
            between_chunks()
            probabilities_NC, features_ND = self._predict(chunk_N, cycle, number)
            features.append(self._gathered(features_ND))
            probabilities.append(self._gathered(probabilities_NC))
        rule_sees_source = self.rule.uses_source and not self.method.labels_whole_target
        source_SD = labels_S = sums_CD = None
        if self.method.surveys_source or rule_sees_source:
            images_S = np.concatenate(source_pools)
            classes = np.arange(len(source_pools))
            labels_S = np.repeat(classes, [len(pool) for pool in source_pools])
            parts = self._source_features(images_S, labels_S, between_chunks)
            if rule_sees_source:
                source_SD = torch.cat([self._gathered(part_ND) for part_ND, _ in parts])
            else:
                sums_CD = self._class_sums(parts, len(source_pools))
        return Survey(
            features_ND=torch.cat(features),
            probabilities_NC=torch.cat(probabilities),
            source_sums_CD=sums_CD,
            stage=stage,
            generator=torch_generator(self.views.device, self.settings.seed, "survey", cycle),
            cycle=cycle,
            source_features_SD=source_SD,
            source_labels_S=None
            if source_SD is None
            else torch.from_numpy(labels_S).to(self.views.device),
            fixed_features=self.fixed_features,
        )

    def _chunks(self, count: int) -> Iterator[Indices]:
        size = self.chunk_size
        return (np.arange(start, min(start + size, count)) for start in range(0, count, size))

    def _gathered(self, rows: Tensor) -> Tensor:
        if self.team.size == 1:
            return rows.clone()  # tensors made in inference mode cannot train
        gathered = np.asarray(self.team.gather(rows.cpu().numpy()))
        return torch.from_numpy(gathered).to(self.views.device)

    def _source_features(
        self, images_S: Indices, labels_S: Indices, between_chunks: BetweenChunks
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features and labels of this process's share of each chunk of source images."""
        device, network = self.views.device, self.method.network
        for chunk_N in self._chunks(len(images_S)):
            between_chunks()
            share_N = chunk_N[self.team.share(len(chunk_N))]
            features_ND = torch.empty(0, network.dim, device=device)
            if len(share_N) > 0:
                with evaluating(self.method, SOURCE), mixed_precision(device, self.bf16):
                    (view,) = self.views.test_batches(SOURCE, images_S[share_N], len(share_N))
                    features_ND = network.features(view).float()
            yield features_ND, torch.from_numpy(labels_S[share_N]).to(device)

    def _class_sums(self, parts: Iterator[tuple[Tensor, Tensor]], num_classes: int) -> Tensor:
        """Sum the unit-length source features of each class over all processes."""
        device = self.views.device
        sums_CD = torch.zeros(num_classes, self.method.network.dim, device=device)
        for features_ND, labels_N in parts:
            sums_CD.index_add_(0, labels_N, F.normalize(features_ND, dim=1))
        if self.team.size == 1:
            return sums_CD
        parts_RCD = torch.from_numpy(np.asarray(self.team.gather(sums_CD[None].cpu().numpy())))
        return parts_RCD.sum(dim=0).to(device)
