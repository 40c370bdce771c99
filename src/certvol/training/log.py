"""Report on training: write history.jsonl, warn about sigma, and estimate the time left."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from certvol.methods._base import AdaptationMethod, Batch
from certvol.progress import Reporter, duration
from certvol.training.keeper import Keeper

DEAD_SIGMA = 1e-3
FIRST_STEPS = 100  # of pretraining, in which sigma finds its scale
LARGEST_SIGMA = 3.0  # times log C, the highest value that the losses pull sigma towards
TIMED_STEPS = 5  # without the first, which is slower
LONG = 3600.0  # seconds


class TrainingLog:
    """Writes a line of history for a step, and gives each kind of warning once."""

    def __init__(self, method: AdaptationMethod, keeper: Keeper, reporter: Reporter) -> None:
        self.method, self.keeper, self.reporter = method, keeper, reporter
        self.warned: set[str] = set()

    def warn_once(self, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            self.reporter.warn(text)

    def step(
        self,
        terms: Mapping[str, float],
        batch: Batch,
        cycle: int,
        step: int,
        learning_rate: float,
    ) -> None:
        """Log a step of a cycle; FloatingPointError if a loss is not finite.

        `cycle` counts the finished cycles of the phase, `step` the steps including this one.
        """
        phase = "adapt" if batch.adapting else "pretrain"
        for name, value in terms.items():
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"at step {step} of {phase} loss term `{name}` is no longer finite"
                )
        weights = self.method.term_weights
        line = {
            "phase": phase,
            "cycle": cycle + 1 if batch.adapting else 0,
            "step": step,
            "lr": learning_rate,
            "loss": sum(weights.get(name, 1.0) * value for name, value in terms.items()),
            **terms,
            **medians(batch),
        }
        self.keeper.log(line)
        self.reporter.note(in_words(line))
        if line["phase"] != "pretrain" or step >= FIRST_STEPS:
            for kind, warning in sigma_warnings(line, self.method.network.num_classes).items():
                self.warn_once(kind, f"step {step}: {warning}")


def medians(batch: Batch) -> dict[str, float | None]:
    """Return the median of each logged value (sigma) per domain; None for a domain without rows.

    This waits for the device.
    """
    found: dict[str, float | None] = {}
    for name, value_N in batch.logged.items():
        parts = value_N.float().tensor_split([batch.num_source])
        for domain, rows in zip(("source", "target"), parts, strict=True):
            found[f"{name}_{domain}"] = float(rows.median()) if len(rows) > 0 else None
    return found


def in_words(line: Mapping[str, Any]) -> str:
    """Return, for example, `loss 2.31 sigma 1.20 source 0.80 target`."""
    words = [f"loss {line['loss']:.2f}"]
    sigma = {domain: line.get(f"sigma_{domain}") for domain in ("source", "target")}
    known = [f"{value:.2f} {domain}" for domain, value in sigma.items() if value is not None]
    return " ".join([*words, "sigma", *known] if known else words)


def sigma_warnings(line: Mapping[str, Any], num_classes: int) -> dict[str, str]:
    """Return warnings by kind if sigma is so large or small that it says nothing."""
    found: dict[str, str] = {}
    log_classes = math.log(num_classes)
    advice = "a lower `training.learning_rate` may help"
    for domain in ("source", "target"):
        sigma = line.get(f"sigma_{domain}")
        if sigma is not None and sigma > LARGEST_SIGMA * log_classes:
            found.setdefault(
                "large sigma",
                f"sigma of the {domain} has grown to {sigma:.1f}, far above its largest target "
                f"log C = {log_classes:.1f}; {advice}",
            )
        if sigma is not None and sigma < DEAD_SIGMA:
            found.setdefault(
                "small sigma",
                f"sigma of the {domain} has collapsed to {sigma:.1e}, so it carries no certainty; "
                f"{advice}",
            )
    return found


@dataclass
class Pace:
    """Warns once if a run on a CPU will take hours, which few users expect.

    `steps` is how many are left. With a `pretrained` backbone, the message suggests freezing it.
    """

    steps: int
    pretrained: bool
    reporter: Reporter
    clock: Callable[[], float] = time.monotonic
    may_settle: bool = False
    done: int = 0
    started: float = 0.0

    def step(self) -> None:
        """Count a step of training."""
        self.done += 1
        if self.done == 1:
            self.started = self.clock()
        elif self.done == 1 + TIMED_STEPS:
            seconds, left = (self.clock() - self.started) / TIMED_STEPS, self.steps - self.done
            if seconds * left < LONG:
                return
            advice = "; `--model.train head` freezes the backbone and takes minutes"
            about = "up to about" if self.may_settle else "at least"
            less = ", less if the labels settle early" if self.may_settle else ""
            self.reporter.say(
                f"a step takes {seconds:.1f} s on this CPU: {about} {duration(seconds * left)} for "
                f"the remaining {left:,} steps{less}{advice if self.pretrained else ''}"
            )
