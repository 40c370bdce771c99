"""The two phases over features in memory, without a run folder: what the estimators of `certvol.sklearn` train with.

Batches, pseudo-labels, steps and learning rates are those of the trainer; there are no files, hold-outs or trials.
"""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.config import GuardConfig, TrainingConfig
from certvol.inference import run_batches
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.norm import TARGET
from certvol.seeding import numpy_generator
from certvol.selection import label_free_scores, signs_of_collapse
from certvol.training.distributed import Team
from certvol.training.labeller import Labeller
from certvol.training.planner import Planner
from certvol.training.schedule import adaptation_rate, pretraining_rate
from certvol.training.stepper import Stepper
from certvol.training.views import Batches

LABELLING_BATCH = 4096
WATCHED = 2048


def fit_views(
    method: AdaptationMethod, views: Batches, source_labels: NDArray[np.int64], settings: TrainingConfig
) -> bool:
    """Pretrains `method` and adapts it to the views' target. True where adaptation collapsed: then it is left pretrained."""
    num_classes, seed = method.network.num_classes, settings.seed
    planner = Planner(settings, np.arange(len(source_labels)), source_labels, num_classes, len(views.target))
    devices = [views.device] if views.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # whoever calls keeps their own random numbers
        stepper = Stepper(method, views, settings, Team(), bf16=False)
        labeller = Labeller(method, views, settings, Team(), False, LABELLING_BATCH)
        steps = settings.pretrain_steps
        plan = planner.pretraining(0, 0, steps)
        method.train()
        for step in range(steps):
            stepper.step(plan, step, step, step / steps, False, pretraining_rate(settings))
        method.eval()
        if not all(bool(tensor.isfinite().all()) for tensor in method.state_dict().values()):
            raise ValueError("training diverged: lower `learning_rate` or raise `batch_size`")
        if len(views.target) == 0 or settings.cycles == 0:
            return False
        pretrained = {name: tensor.clone() for name, tensor in method.state_dict().items()}
        before_NC = _target_probabilities(method, views, seed)
        method.train()
        total = settings.cycles * settings.cycle_steps
        for cycle in range(settings.cycles):
            first = cycle * settings.cycle_steps
            plan, _ = planner.adaptation(cycle, first, settings.cycle_steps, labeller, lambda: None)
            for step in range(plan.steps):
                progress = (first + step) / total
                stepper.step(plan, step, first + step, progress, True, adaptation_rate(settings, progress))
        method.eval()
    return _went_back(method, views, seed, before_NC, pretrained)


def _target_probabilities(method: AdaptationMethod, views: Batches, seed: int) -> NDArray[np.float32]:
    watched = numpy_generator(seed, "watched").permutation(len(views.target))[:WATCHED]
    return run_batches(method, views.test_batches(TARGET, watched, LABELLING_BATCH), TARGET).probabilities_NC


def _went_back(
    method: AdaptationMethod,
    views: Batches,
    seed: int,
    before_NC: NDArray[np.float32],
    pretrained: dict[str, torch.Tensor],
) -> bool:
    guard = GuardConfig()
    after_NC = _target_probabilities(method, views, seed)
    if np.isfinite(after_NC).all():
        scores, start = (label_free_scores(p, before_NC, None) for p in (after_NC, before_NC))
        signs = signs_of_collapse(scores, start, guard.spread, guard.source_accuracy)
    else:
        signs = ["predictions are no longer finite"]
    if signs:
        method.load_state_dict(pretrained)
        warnings.warn(f"adaptation collapsed ({'; '.join(signs)}); the pretrained model is kept", stacklevel=5)
    return bool(signs)
