"""Score the model after every cycle, without labels, and choose which one the run delivers.

`Watch` predicts fixed images of both domains and scores them. `ModelChoice` delivers the last
cycle's model, unless the collapse guard or a validator chooses another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import get_total_norm

from certvol.data import Indices
from certvol.data.views import Views
from certvol.device import evaluation_batch
from certvol.distributed import Team
from certvol.methods._base import AdaptationMethod, Survey
from certvol.nn import norm
from certvol.nn.acceleration import uses_bf16
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict.forward import (
    Outputs,
    evaluating,
    gathered,
    mixed_precision,
    run_batches,
    watched_images,
)
from certvol.randomness import numpy_generator
from certvol.scores.validators import (
    DIRECTION,
    VALIDATORS,
    WatchedOutputs,
    agreement,
    label_free_scores,
    signs_of_collapse,
    unfounded_change,
)
from certvol.settings import Config, GuardConfig

Scores = dict[str, float | None]
GUARD_VALIDATOR = "mutual_information"  # chooses among the healthy cycles after a collapse


class Watch:
    """The target and held-out source images that the model of every cycle predicts."""

    def __init__(
        self,
        method: AdaptationMethod,
        views: Views,
        held_out: Indices,
        source_labels: Indices,
        config: Config,
        team: Team,
    ) -> None:
        self.method, self.views, self.team = method, views, team
        self.source_labels = source_labels
        self.bf16 = uses_bf16(config.training, method.network, views.device)
        images, seed = config.guard.images, config.training.seed
        self.target_images = watched_images(len(views.target), config)
        mixed = numpy_generator(seed, "watched.source").permutation(held_out)
        self.source_images = mixed[: max(1, images // 2)]

    def predict(self, domain: int, images_N: Indices, norm_domain: int) -> Outputs:
        """Predict with the statistics of `norm_domain`; FloatingPointError if not finite."""
        share_N = images_N[self.team.share(len(images_N))]
        size = evaluation_batch(self.views.device)
        batches = self.views.test_batches(domain, share_N, size)
        return _finite(
            gathered(run_batches(self.method, batches, norm_domain, self.bf16), self.team)
        )

    def target(self, norm_domain: int = TARGET) -> Outputs:
        return self.predict(TARGET, self.target_images, norm_domain)

    def surveyed(self, survey: Survey) -> Outputs:
        """Return the same as `target`, from a survey instead of another pass over the images."""
        device = survey.probabilities_NC.device
        rows = torch.from_numpy(self.target_images).to(device)
        with evaluating(self.method, TARGET), mixed_precision(device, self.bf16):
            sigma_N = self.method.sigma(survey.features_ND[rows])
        return _finite(
            Outputs(
                survey.probabilities_NC[rows].float().cpu().numpy(),
                None if sigma_N is None else sigma_N.float().cpu().numpy(),
            )
        )

    def source_accuracy(self) -> float | None:
        """Return the accuracy on held-out source images; None without any."""
        if len(self.source_images) == 0:
            return None
        predicted_N = self.predict(SOURCE, self.source_images, SOURCE).labels_N
        return float((predicted_N == self.source_labels[self.source_images]).mean())

    def features(
        self, domain: int, images_N: Indices, between_batches: Callable[[], None]
    ) -> Tensor:
        """Return features on the CPU, with the domain's own statistics."""
        found = []
        for batch in self.views.test_batches(domain, images_N, evaluation_batch(self.views.device)):
            between_batches()
            with evaluating(self.method, domain):
                found.append(self.method.network.features(batch).cpu())
        return torch.cat(found)

    def scores(self, outputs: Outputs, pretrained_NC: NDArray[np.float32], fitted: bool) -> Scores:
        """Score the model by its predictions of the target and of held-out source images.

        A model `fitted` in closed form classifies the target with the target's own mean and scale,
        so its accuracy on the source says nothing.
        """
        accuracy = None if fitted else self.source_accuracy()
        seen = WatchedOutputs(outputs.probabilities_NC, outputs.sigma_N, accuracy)
        return label_free_scores(seen, pretrained_NC)


def _finite(outputs: Outputs) -> Outputs:
    if not outputs.finite:
        raise FloatingPointError("the model's predictions are no longer finite")
    return outputs


def check_finite(method: AdaptationMethod) -> None:
    """Raise FloatingPointError if a weight is not finite: a step changes weights after its loss."""
    weights = [w for w in method.state_dict().values() if w.is_floating_point() and w.numel() > 0]
    if not get_total_norm(weights, norm_type=math.inf).isfinite():
        raise FloatingPointError("the model's weights are no longer finite")


@dataclass(frozen=True)
class Delivery:
    """The delivered model and the reason."""

    model: str
    """`last`, `cycle N` or `pretrained`."""
    why: str
    mode: norm.Mode
    """The norm mode that the model predicts with."""


class ModelChoice:
    """Remembers each validator's best healthy cycle, and delivers a model.

    Among equal scores the newest cycle counts as best, because a score can reach its maximum.
    """

    def __init__(self, config: GuardConfig, classes_expected: float | None = None) -> None:
        self.config, self.classes_expected = config, classes_expected
        asked = VALIDATORS if config.keep == "all" else (config.select,)
        self.validators = tuple(
            dict.fromkeys((GUARD_VALIDATOR, *(v for v in asked if v != "last")))
        )
        self.start({})

    def start(self, pretrained: Scores) -> None:
        """Start adaptation from a model with these scores."""
        self.pretrained, self.last = dict(pretrained), pretrained
        self.expect(self.classes_expected)
        self.collapsed_in_a_row = 0
        self.best: dict[str, tuple[int, float]] = {}
        """Each validator's best cycle and its score; a higher score is better."""
        self.sum_NC: NDArray[np.float32] | None = None
        """The sum of all cycles' probabilities, for `ensv`."""
        self.best_NC: NDArray[np.float32] | None = None
        """The probabilities of the best cycle by `ensv`."""

    def expect(self, classes: float | None) -> None:
        """Note how many classes the target seems to have; None if nothing is known."""
        if classes is not None:
            before = self.pretrained.get("classes_expected")
            fewer = classes if before is None else min(before, classes)
            self.pretrained["classes_expected"] = fewer

    def note_cycle(
        self, cycle: int, scores: Scores, probabilities_NC: NDArray[np.float32]
    ) -> list[str]:
        """Note a cycle's scores; return the validators that rate it best, none if it collapsed."""
        self.last = scores
        if self.signs_of_collapse():
            self.collapsed_in_a_row += 1
            return []
        self.collapsed_in_a_row = 0
        return [name for name in self.validators if self._is_best(name, cycle, probabilities_NC)]

    def _is_best(self, name: str, cycle: int, probabilities_NC: NDArray[np.float32]) -> bool:
        if name == "ensv":
            return self._agrees_more(cycle, probabilities_NC)
        value = self.last.get(name)
        if value is None or DIRECTION[name] * value < self.best.get(name, (0, -np.inf))[1]:
            return False
        self.best[name] = (cycle, DIRECTION[name] * value)
        return True

    def _agrees_more(self, cycle: int, probabilities_NC: NDArray[np.float32]) -> bool:
        """Compare this cycle with the best one so far: which agrees more with the mean of all?"""
        before = self.sum_NC
        self.sum_NC = probabilities_NC.copy() if before is None else before + probabilities_NC
        score = agreement(probabilities_NC, self.sum_NC)
        best = None if self.best_NC is None else agreement(self.best_NC, self.sum_NC)
        if best is not None and best > score:
            self.best["ensv"] = (self.best["ensv"][0], best)
            return False
        self.best["ensv"], self.best_NC = (cycle, score), probabilities_NC
        return True

    def signs_of_collapse(self) -> list[str]:
        """Return the signs of collapse in the newest cycle, in words."""
        config = self.config
        return signs_of_collapse(self.last, self.pretrained, config.spread, config.source_accuracy)

    def final_signs(self, fitted: bool) -> list[str]:
        """Return the signs against the model of the last cycle.

        A model `fitted` in closed form may replace a classifier that was near chance, whose
        predictions are no standard for it.
        """
        signs = self.signs_of_collapse()
        change = None if fitted else unfounded_change(self.last, self.pretrained)
        return signs or ([] if change is None else [change])

    @property
    def has_collapsed(self) -> bool:
        """True if `guard.patience` cycles in a row looked collapsed."""
        return self.collapsed_in_a_row >= self.config.patience

    def deliver(
        self,
        last: int,
        collapse: list[str],
        settled: bool,
        mode: norm.Mode,
        source_mode: norm.Mode,
    ) -> tuple[Delivery, str | None]:
        """Return the delivery, and the validator whose best weights are its model.

        `last` is the newest cycle, and `collapse` holds the signs that ended adaptation. `settled`
        says that it ended because labels stopped changing. The pretrained model predicts with
        `source_mode`.
        """
        select = self.config.select
        validator = GUARD_VALIDATOR if select == "last" else select
        best = self.best.get(validator, (None,))[0]
        if not collapse:
            if select == "last" or best in (None, last):
                reason = "labels settled" if settled else "the last one"
                return Delivery("last", f"cycle {last}, {reason}", mode), None
            why = f"the best of {last} cycles by {select}"
            return Delivery(f"cycle {best}", why, mode), validator
        collapsed = f"adaptation collapsed at cycle {last} ({'; '.join(collapse)})"
        if self.config.action == "pretrained":
            why = f"{collapsed}, so the model before adaptation is safer"
            return Delivery("pretrained", why, source_mode), None
        if best is None:
            why = f"{collapsed} and no cycle was healthy"
            return Delivery("pretrained", why, source_mode), None
        why = f"{collapsed}; this is cycle {best}, the best before"
        return Delivery(f"cycle {best}", why, mode), validator

    # --- as part of a checkpoint

    def facts(self) -> dict[str, Any]:
        return {
            "pretrained": self.pretrained,
            "last": self.last,
            "collapsed_in_a_row": self.collapsed_in_a_row,
            "best": {name: [cycle, score] for name, (cycle, score) in self.best.items()},
        }

    def tensors(self) -> dict[str, Tensor]:
        arrays = {"sum_NC": self.sum_NC, "best_NC": self.best_NC}
        return {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if not set(facts["best"]) <= set(VALIDATORS):
            raise ValueError("unknown validator in checkpoint")
        self.pretrained, self.last = dict(facts["pretrained"]), dict(facts["last"])
        self.collapsed_in_a_row = int(facts["collapsed_in_a_row"])
        self.best = {name: (int(cycle), float(s)) for name, (cycle, s) in facts["best"].items()}
        self.sum_NC = tensors["sum_NC"].numpy() if "sum_NC" in tensors else None
        self.best_NC = tensors["best_NC"].numpy() if "best_NC" in tensors else None
