"""Take one optimiser step: build the batch that the plan names, and update the weights."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from certvol.data.batches import CyclePlan, class_visits
from certvol.data.reviewed import ReviewedLabels
from certvol.data.views import Views
from certvol.distributed import Team
from certvol.methods._base import AdaptationMethod, Batch, ReviewedRows
from certvol.methods._losses import mean_cross_entropy
from certvol.nn import norm
from certvol.nn.teacher import own_name
from certvol.predict.forward import mixed_precision
from certvol.randomness import numpy_generator, seed_torch, torch_generator, torch_seed
from certvol.settings import TrainingConfig
from certvol.training.cuda_graph import Recorder
from certvol.training.optimizers import OPTIMIZERS

SMALLEST_NORM = 1e-12  # of the gradient that SAM moves weights along, which is a divisor
STATISTICS_BATCHES = 16  # for the first estimate of the target's statistics
REVIEWED = "reviewed"  # name of the loss on reviewed rows
HEAD_RATE = 10.0  # usual `training.head_rate` behind a frozen backbone


class _Losses(nn.Module):
    """A method's losses as a module's forward, which DistributedDataParallel needs."""

    def __init__(self, method: AdaptationMethod) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        terms = self.method.loss_terms(batch)
        return terms if batch.reviewed is None else {**terms, REVIEWED: self._on(batch.reviewed)}

    def _on(self, rows: ReviewedRows) -> Tensor:
        """Return the classifier's loss on reviewed rows.

        They are normalised as in prediction: they are too few, and too alike, for statistics.
        """
        network = self.method.network
        with network.rows_of(domain=norm.TARGET), norm.stored_statistics(self.method):
            logits_RC = self.method.logits(network.features(rows.inputs))
        return mean_cross_entropy(logits_RC, rows.labels_R) * rows.weight


class Stepper:
    """Holds the optimiser and takes steps.

    With several processes, each trains on its share of a batch's source rows and target rows.
    """

    def __init__(
        self,
        method: AdaptationMethod,
        views: Views,
        settings: TrainingConfig,
        team: Team,
        bf16: bool,
        reviewed: ReviewedLabels | None = None,
    ) -> None:
        self.method, self.views, self.settings, self.team = method, views, settings, team
        self.reviewed = reviewed
        self.bf16 = bf16
        self.losses: nn.Module | None = None
        """The losses of the present phase; `losses_adapt` says which phase that is."""
        self.losses_adapt = False
        self.tables: dict[str, Tensor] = {}
        """The tables that the method keeps on every target image, on the training device."""
        self.noise = torch.Generator(views.device)
        self.ahead: tuple[CyclePlan, int, Batch] | None = None
        """A plan, the number of its next step, and the batch built ahead for that step."""
        recorded = views.device.type == "cuda" and settings.record and team.size == 1
        self.recorder = Recorder(self._train_on, enabled=recorded)
        self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Start again without momentum."""
        settings, device, recorded = self.settings, self.views.device, self.recorder.enabled
        by_rate: dict[float, list[nn.Parameter]] = {}
        for name, weight in self.method.named_parameters():
            if weight.requires_grad:
                by_rate.setdefault(self._rate_of(name), []).append(weight)
        rate = settings.learning_rate
        groups: list[dict[str, Any]] = [
            # A recorded step reads its learning rate from a tensor.
            {
                "params": weights,
                "times": times,
                "lr": torch.tensor(rate, device=device) if recorded else rate,
            }
            for times, weights in by_rate.items()
        ]
        build = OPTIMIZERS[settings.optimizer]
        self.optimizer = build(groups, settings, device.type == "cuda", recorded)
        self.recorder.forget()
        return self.optimizer

    def _rate_of(self, weight: str) -> float:
        """Return the rate of a weight, relative to `training.learning_rate`.

        A given `training.head_rate` multiplies the rate that the method declares. The default
        behind a frozen backbone holds only for weights without a declared rate: RSDA's
        discriminator diverges at the product of both, 100.
        """
        own = self.method.rate_of(weight)
        if weight.startswith("network.backbone."):
            return own
        if self.settings.head_rate is not None:
            return own * self.settings.head_rate
        frozen = self.method.network.trained_part == "head"
        return HEAD_RATE if frozen and own == 1 else own

    def step(
        self,
        plan: CyclePlan,
        index: int,
        place: int,
        progress: float,
        adapting: bool,
        learning_rate: float,
    ) -> tuple[dict[str, Tensor], Batch]:
        """Take step `index` of the plan, number `place` of the phase; never wait for the device."""
        for group in self.optimizer.param_groups:
            rate = learning_rate * group["times"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        batch = self._next_batch(plan, index, place, adapting)
        batch.progress.fill_(progress)
        seed = self.settings.seed
        dropout_seed = torch_seed(seed, _stream("dropout", adapting), place, self.team.rank)
        seed_torch(self.views.device, dropout_seed)
        self.noise.manual_seed(torch_seed(seed, _stream("noise", adapting), place))
        domains = self.method.network.domains
        trained = self.recorder.run(batch, domains.mode, self.method.uses_split or domains.apart)
        if self.views.device.type == "cuda" and index + 1 < plan.steps:
            # Prepare the next batch while the device computes this step.
            coming = self._batch(plan, index + 1, place + 1, adapting)
            self.ahead = (plan, index + 1, coming)
        return trained

    def _next_batch(self, plan: CyclePlan, index: int, place: int, adapting: bool) -> Batch:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            planned, number, batch = ahead
            if planned is plan and number == index:
                return batch
        return self._batch(plan, index, place, adapting)

    def _train_on(self, batch: Batch) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        with self._at_sam_weights(batch):
            terms = self._terms(batch, self._losses(batch.adapting))
            self._loss(terms, batch).backward()  # type: ignore[no-untyped-call]
        if self.settings.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.method.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.average_buffers()
        if batch.adapting and self.method.teacher is not None:
            self.method.teacher.follow()
        return {name: term.detach() for name, term in terms.items()}

    def _terms(
        self, batch: Batch, losses: Callable[[Batch], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        precision = mixed_precision(self.views.device, self.bf16)
        with self.method.network.rows_of(num_source=batch.num_source), precision:
            return losses(batch)

    def _loss(self, terms: dict[str, Tensor], batch: Batch) -> Tensor:
        own = {name: term for name, term in terms.items() if name != REVIEWED}
        loss = self._weighted(self.method.loss(own), batch)
        return loss if batch.reviewed is None else loss + terms[REVIEWED]

    def _weighted(self, loss: Tensor, batch: Batch) -> Tensor:
        """Weight a loss by its share of the batch, since gradients are averaged over processes."""
        weight = len(batch.rows) * self.team.size / batch.total
        return loss if weight == 1 else loss * weight

    @contextmanager
    def _at_sam_weights(self, batch: Batch) -> Iterator[None]:
        """Inside the context, move the weights by `method.sam_radius` along the whole gradient."""
        method = self.method
        if not batch.adapting or method.sam_radius == 0:
            yield
            return
        weights = [weight for weight in method.parameters() if weight.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        loss = method.sam_loss(self._terms(batch, method.loss_terms))
        gradients = torch.autograd.grad(
            self._weighted(loss, batch), weights, allow_unused=True, materialize_grads=True
        )
        self.team.average(gradients)
        with torch.no_grad():
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient * (method.sam_radius / norm.clamp(min=SMALLEST_NORM)))
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, before, strict=True):
                    weight.copy_(old)

    def _losses(self, adapting: bool) -> nn.Module:
        """Return one module per phase: `static_graph` needs the same networks at every step."""
        if self.losses is None or self.losses_adapt != adapting:
            losses: nn.Module = _Losses(self.method)
            if self.team.size > 1:
                with warnings.catch_warnings():
                    # The successor of broadcast_buffers is not in torch 2.11.
                    warnings.simplefilter("ignore", FutureWarning)
                    losses = DistributedDataParallel(
                        losses, broadcast_buffers=False, static_graph=True
                    )
            self.losses, self.losses_adapt = losses, adapting
        return self.losses

    def _batch(self, plan: CyclePlan, index: int, place: int, adapting: bool) -> Batch:
        """Build a batch; the caller sets its progress later."""
        seed, device = self.settings.seed, self.views.device
        whole, num_source = plan.images_SN[index], int(plan.num_source_S[index])
        source, target = self.team.share(num_source), self.team.share(len(whole) - num_source)
        rows = np.r_[source, target.start + num_source : target.stop + num_source]
        own_source = source.stop - source.start

        def view(stream: str) -> Tensor:
            generator = torch_generator("cpu", seed, _stream(stream, adapting), place)
            return self.views.training_batch(whole, rows, own_source, generator)

        tables: dict[str, Tensor] = {}
        if adapting and self.tables:
            target_N = torch.from_numpy(whole[rows[own_source:]]).to(device, non_blocking=True)
            tables = {name: table[target_N] for name, table in self.tables.items()}
        return Batch(
            inputs=view("views"),
            labels_N=torch.from_numpy(plan.labels_SN[index][rows]).to(device, non_blocking=True),
            num_source=own_source,
            rows=torch.from_numpy(rows),
            total=len(whole),
            generator=self.noise,
            progress=torch.zeros((), device=device),
            adapting=adapting,
            other_inputs=view("views.other")
            if adapting and self.method.views_per_image > 1
            else None,
            tables=tables,
            reviewed=self._reviewed_rows(place, len(whole)) if adapting else None,
        )

    def _reviewed_rows(self, place: int, others: int) -> ReviewedRows | None:
        """Draw this process's reviewed rows of step `place`, which follow from the seed alone."""
        if self.reviewed is None:
            return None
        known, seed, share = self.reviewed, self.settings.seed, self.settings.reviewed_share
        count = max(self.team.size, round(others * share / (1 - share)))
        # Labels are drawn as classes are: a window into an endless row of permutations.
        (drawn_R,) = class_visits(len(known.images_R), count, place, 1, seed, "adapt.reviewed")
        rows = np.arange(count)[self.team.share(count)]
        generator = torch_generator("cpu", seed, "adapt.views.reviewed", place)
        inputs = self.views.training_batch(known.images_R[drawn_R], rows, 0, generator)
        labels_R = torch.from_numpy(known.labels_R[drawn_R[rows]])
        weight = len(rows) * self.team.size / others
        return ReviewedRows(inputs, labels_R.to(self.views.device, non_blocking=True), weight)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average across processes the buffers that each updates from its own rows.

        This runs after every step, so that a checkpoint can be written at any time.
        """
        if self.team.size == 1:
            return
        # A teacher's weights are buffers, and the same in all processes.
        weights = {own_name(name) for name, _ in self.method.named_parameters()}
        self.team.average(
            buffer
            for name, buffer in self.method.named_buffers()
            if name.removeprefix("teacher.") not in weights and buffer.is_floating_point()
        )

    def start_teacher(self) -> None:
        if self.method.teacher is not None:
            self.method.teacher.start()

    def set_norm_mode(self, mode: norm.Mode) -> None:
        """Give a pretrained model, which has only the source's statistics, those of a norm mode."""
        method, network = self.method, self.method.network
        network.domains.mode = mode
        if network.domains.apart:
            norm.copy_source_to_target(method)
            size, seed = self.settings.batch_size, self.settings.seed
            order = numpy_generator(seed, "statistics").permutation(len(self.views.target))
            images = order[: STATISTICS_BATCHES * size]
            if len(images) > 1:  # one image has no variance: keep the source's statistics
                even = math.ceil(len(images) / math.ceil(len(images) / size))
                precision = mixed_precision(self.views.device, self.bf16)
                with network.rows_of(domain=norm.TARGET), precision:
                    batches = self.views.test_batches(norm.TARGET, images, even)
                    # Run the head too: a method's own head may have layers with statistics.
                    norm.estimate_target_statistics(
                        method, batches, lambda inputs: method.logits(network.features(inputs))
                    )
            self.average_buffers()
        self.start_teacher()

    def averaged(self, terms: dict[str, Tensor], batch: Batch) -> dict[str, float]:
        """Return the loss terms of the whole batch as numbers; this waits for the device."""
        values = torch.stack([term.detach().float() for term in terms.values()]).cpu()
        values *= len(batch.rows) * self.team.size / batch.total
        self.team.average([values])
        return dict(zip(terms, values.tolist(), strict=True))


def _stream(name: str, adapting: bool) -> str:
    return f"{'adapt' if adapting else 'pretrain'}.{name}"
