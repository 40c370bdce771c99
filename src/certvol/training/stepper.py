"""One optimiser step: from a plan's row to changed weights."""

import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from certvol.config import TrainingConfig
from certvol.data.batches import CyclePlan
from certvol.inference import mixed_precision
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.teacher import own_name
from certvol.seeding import torch_generator, torch_seed
from certvol.training.distributed import Team
from certvol.training.recording import Recorder
from certvol.training.views import Batches


class _Losses(nn.Module):
    """A method's losses as a module's forward, which is what DistributedDataParallel takes."""

    def __init__(self, method: AdaptationMethod) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.method.loss_terms(batch)


class Stepper:
    """Holds the optimiser. Every process of a team trains on its share of the batch's source and of its target rows."""

    def __init__(
        self, method: AdaptationMethod, views: Batches, settings: TrainingConfig, team: Team, bf16: bool
    ) -> None:
        self.method, self.views, self.settings, self.team, self.bf16 = method, views, settings, team, bf16
        self.phase_losses: dict[bool, nn.Module] = {}
        self.tables: dict[str, Tensor] = {}
        """What the method has noted of every target image, on the training device."""
        self.noise = torch.Generator(views.device)
        self.ahead: tuple[CyclePlan, int, int, bool, Batch] | None = None
        on_gpu = views.device.type == "cuda"
        self.recorder = Recorder(self._train_on, enabled=on_gpu and settings.record and team.size == 1)
        self.new_optimizer()

    def _losses(self, adapting: bool) -> nn.Module:
        """Of a phase: which networks its losses leave out does not change within it, which is what `static_graph` asks for."""
        if adapting not in self.phase_losses:
            losses: nn.Module = _Losses(self.method)
            if self.team.size > 1:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore", FutureWarning
                    )  # the successor of broadcast_buffers is not in torch 2.11
                    losses = DistributedDataParallel(losses, broadcast_buffers=False, static_graph=True)
            self.phase_losses = {adapting: losses}
        return self.phase_losses[adapting]

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Without any momentum yet."""
        settings, device, recorded = self.settings, self.views.device, self.recorder.enabled
        by_rate: dict[float, list[nn.Parameter]] = {}
        for name, weight in self.method.named_parameters():
            if weight.requires_grad:
                by_rate.setdefault(self._rate_of(name), []).append(weight)
        rate = settings.learning_rate
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            [
                # In a tensor, so that a recorded step can be given another.
                {"params": own, "times": times, "lr": torch.tensor(rate, device=device) if recorded else rate}
                for times, own in by_rate.items()
            ],
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
            fused=device.type == "cuda",
        )
        self.recorder.forget()
        return self.optimizer

    def _rate_of(self, weight: str) -> float:
        behind = 1.0 if weight.startswith("network.backbone.") else self.settings.head_rate
        return behind * self.method.rate_of(weight)

    def step(
        self, plan: CyclePlan, index: int, place: int, progress: float, adapting: bool, learning_rate: float
    ) -> tuple[dict[str, Tensor], Batch]:
        """`index` of the step in the plan, `place` of it in the phase. Never waits for the device."""
        for group in self.optimizer.param_groups:
            rate = learning_rate * group["times"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        batch = self._ready(plan, index, place, adapting)
        batch.progress.fill_(progress)
        torch.manual_seed(torch_seed(self.settings.seed, _stream("dropout", adapting), place, self.team.rank))
        self.noise.manual_seed(torch_seed(self.settings.seed, _stream("noise", adapting), place))
        domains = self.method.network.domains
        trained = self.recorder.run(batch, domains.mode, self.method.uses_split or domains.apart)
        if self.views.device.type == "cuda" and index + 1 < plan.steps:
            # The next batch is under way before anyone waits for this step.
            self.ahead = (plan, index + 1, place + 1, adapting, self._batch(plan, index + 1, place + 1, adapting))
        return trained

    def _ready(self, plan: CyclePlan, index: int, place: int, adapting: bool) -> Batch:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] is plan and ahead[1:4] == (index, place, adapting):
            return ahead[4]
        return self._batch(plan, index, place, adapting)

    def _train_on(self, batch: Batch) -> dict[str, Tensor]:
        with self.method.network.rows_of(num_source=batch.num_source), mixed_precision(self.views.device, self.bf16):
            terms: dict[str, Tensor] = self._losses(batch.adapting)(batch)
        # Processes' gradients are averaged: a larger share than theirs weighs more.
        weight = len(batch.rows) * self.team.size / batch.total
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.method.loss(terms)
        (loss if weight == 1 else loss * weight).backward()  # type: ignore[no-untyped-call]
        if self.settings.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.method.parameters(), self.settings.grad_clip)
        self._start_momentum()
        self.optimizer.step()
        self.method.after_step()
        self.even_out()
        if batch.adapting and self.method.teacher is not None:
            self.method.teacher.follow()
        return {name: term.detach() for name, term in terms.items()}

    def _start_momentum(self) -> None:
        """Of weights that get their first gradient now, as a discriminator's do when adaptation starts: a fused step takes the
        momentum of all weights or of none. From 0 it is the step it would have been."""
        for group in self.optimizer.param_groups if self.settings.momentum > 0 else ():
            for weight in group["params"]:
                if weight.grad is not None and self.optimizer.state[weight].get("momentum_buffer") is None:
                    self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    def _batch(self, plan: CyclePlan, index: int, place: int, adapting: bool) -> Batch:
        """Its progress is filled in later."""
        seed, device = self.settings.seed, self.views.device
        whole, num_source = plan.images_SN[index], int(plan.num_source_S[index])
        source, target = self.team.share(num_source), self.team.share(len(whole) - num_source)
        rows = np.r_[source, target.start + num_source : target.stop + num_source]
        views = torch_generator("cpu", seed, _stream("views", adapting), place)
        own_source = source.stop - source.start
        other_images_NCHW = None
        if adapting and self.method.views_per_image > 1:
            others = torch_generator("cpu", seed, _stream("views.other", adapting), place)
            other_images_NCHW = self.views.training_batch(whole, rows, own_source, others)
        tables: dict[str, Tensor] = {}
        if adapting and self.tables:
            target_N = torch.from_numpy(whole[rows[own_source:]]).to(device, non_blocking=True)
            tables = {name: table[target_N] for name, table in self.tables.items()}
        return Batch(
            images_NCHW=self.views.training_batch(whole, rows, own_source, views),
            labels_N=torch.from_numpy(plan.labels_SN[index][rows]).to(device, non_blocking=True),
            num_source=own_source,
            rows=torch.from_numpy(rows),
            total=len(whole),
            generator=self.noise,
            progress=torch.zeros((), device=device),
            adapting=adapting,
            other_images_NCHW=other_images_NCHW,
            tables=tables,
        )

    @torch.no_grad()
    def even_out(self) -> None:
        """Over all processes, what each moves by its own rows: statistics, and what else a method keeps beside its weights. After
        every step, so that it does not matter when a checkpoint is written."""
        if self.team.size == 1:
            return
        weights = {own_name(name) for name, _ in self.method.named_parameters()}  # a teacher's are alike as they are
        moved = {n: b for n, b in self.method.named_buffers() if n.removeprefix("teacher.") not in weights}
        self.team.average(buffer for buffer in moved.values() if buffer.is_floating_point())

    def averaged(self, terms: dict[str, Tensor], batch: Batch) -> dict[str, float]:
        """The terms over all processes, as numbers: waits for the device."""
        values = torch.stack([term.detach().float() for term in terms.values()]).cpu()
        values *= len(batch.rows) * self.team.size / batch.total
        self.team.average([values])
        return dict(zip(terms, values.tolist(), strict=True))


def _stream(name: str, adapting: bool) -> str:
    return f"{'adapt' if adapting else 'pretrain'}.{name}"
