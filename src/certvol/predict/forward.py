"""Run a model on batches: probabilities, sigma, further measures of certainty and features."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from certvol.data.folders import printable
from certvol.distributed import Team
from certvol.errors import UserError
from certvol.methods._base import AdaptationMethod
from certvol.nn.norm import SOURCE, TARGET, Mode
from certvol.randomness import numpy_generator
from certvol.scores import calibration
from certvol.scores.uncertainty import LABEL_FREE, MEASURES, logit_measures
from certvol.settings import Config

Values = NDArray[np.float32]
# Computes further measures from a batch: its features, its logits and its place among all images.
ExtraMeasures = Callable[[Tensor, Tensor, slice], dict[str, Tensor]]
Measured = TypeVar("Measured", Values, np.float32, float)
BATCHES_ON_DEVICE = 16  # batches of outputs that are copied to the host together


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a model for N images, on the CPU."""

    probabilities_NC: Values
    sigma_N: Values | None = None
    extra: dict[str, Values] = field(default_factory=dict)
    """The measures of `scores.uncertainty.MEASURES` beyond probability and sigma, if computed."""
    features_KD: Values = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """The features of the K images that were asked for."""
    logits_NC: Values | None = None
    """The logits behind the probabilities, if known: a small probability rounds to 0."""

    @property
    def labels_N(self) -> NDArray[np.int64]:
        return np.asarray(np.argmax(self.probabilities_NC, axis=1))

    @property
    def confidence_N(self) -> Values:
        return np.asarray(self.probabilities_NC.max(axis=1))

    @property
    def measures(self) -> dict[str, Values]:
        sigma = {} if self.sigma_N is None else {"sigma": self.sigma_N}
        return {"probability": self.confidence_N, **sigma, **self.extra}

    @property
    def label_free(self) -> dict[str, Values]:
        """The measures that need no labels, with signs set so that higher means more certain."""
        measures = self.measures
        return {name: certainty(name, measures[name]) for name in LABEL_FREE if name in measures}

    def rows(self, rows_R: NDArray[np.int64]) -> "Outputs":
        """Return the outputs of some images, and all features that were kept."""
        return Outputs(
            self.probabilities_NC[rows_R],
            None if self.sigma_N is None else self.sigma_N[rows_R],
            {name: values_N[rows_R] for name, values_N in self.extra.items()},
            self.features_KD,
            None if self.logits_NC is None else self.logits_NC[rows_R],
        )

    def at_temperature(self, temperature: float) -> "Outputs":
        """Divide the logits by a temperature. Measures of them follow, and no label changes."""
        if temperature == 1:
            return self
        logits_NC = self.logits_NC
        if logits_NC is None:
            logits_NC = calibration.logits_of(self.probabilities_NC).astype(np.float32)
        scaled_NC = logits_NC.astype(np.float64) / temperature
        probabilities_NC = _keeping_labels(softmax(scaled_NC, axis=1), self.labels_N)
        measures = logit_measures(torch.from_numpy(scaled_NC))
        extra = {name: measures[name].numpy() for name in self.extra.keys() & measures.keys()}
        if "probability" in extra:
            extra["probability"] = probabilities_NC.max(axis=1)
        if "logit_gt" in self.extra:
            extra["logit_gt"] = self.extra["logit_gt"] / np.float32(temperature)
        return replace(
            self,
            probabilities_NC=probabilities_NC,
            extra={**self.extra, **extra},
            logits_NC=scaled_NC.astype(np.float32),
        )

    @property
    def finite(self) -> bool:
        return not self.faulty_N().any()

    def faulty_N(self, measure: str | None = None) -> NDArray[np.bool_]:
        """Return which images have probabilities, sigma or a further measure not finite."""
        faulty_N = ~np.isfinite(self.probabilities_NC).all(axis=1)
        further = [self.sigma_N, None if measure is None else self.measures[measure]]
        for values_N in further:
            if values_N is not None:
                faulty_N |= ~np.isfinite(values_N)
        return np.asarray(faulty_N)

    def refuse_faulty(self, names: Sequence[str] | None, measure: str | None = None) -> None:
        """Raise UserError, which names one of the images, if some outputs are not finite."""
        faulty_N = self.faulty_N(measure)
        if faulty_N.any():
            first = int(faulty_N.argmax())
            shown = f"row {first}" if names is None else printable(names[first])
            raise UserError(
                f"the model's output for {int(faulty_N.sum())} of {len(faulty_N)} inputs, such as "
                f"{shown}, is not a finite number: their values are too large for it; leave them "
                "out"
            )


def _keeping_labels(soft_NC: NDArray[np.float64], labels_N: NDArray[np.int64]) -> Values:
    """Round to float32, where two nearly equal probabilities may become the same."""
    rounded_NC = soft_NC.astype(np.float32)
    tied = np.flatnonzero(rounded_NC.argmax(axis=1) != labels_N)
    highest = rounded_NC[tied].max(axis=1)
    rounded_NC[tied, labels_N[tied]] = np.nextafter(highest, np.float32(1))
    return rounded_NC


def certainty(measure: str, values: Measured) -> Measured:
    """Set the sign of a measure so that higher means more certain; a second call sets it back."""
    return values if MEASURES[measure].more_is_certain else -values


@contextmanager
def evaluating(method: AdaptationMethod, domain: int) -> Iterator[None]:
    """Switch off gradients and dropout, and normalise by the stored statistics of `domain`.

    A method with a teacher answers with the teacher's weights.
    """
    was_training = method.training
    method.eval()
    try:
        with (
            method.teacher.in_charge() if method.teacher else nullcontext(),
            torch.inference_mode(),
            method.network.rows_of(domain=domain),
        ):
            yield
    finally:
        method.train(was_training)


def mixed_precision(device: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def run_batches(
    method: AdaptationMethod,
    batches: Iterable[Tensor],
    domain: int,
    bf16: bool = False,
    extra: ExtraMeasures | None = None,
    kept_K: NDArray[np.int64] | None = None,
) -> Outputs:
    """Run the model once on `batches` of normalised images, or of features, on its device.

    `kept_K` lists, in ascending order, the images whose features to keep.
    """
    waiting: dict[str, list[Tensor]] = defaultdict(list)
    copied: dict[str, list[Tensor]] = defaultdict(list)

    def copy_to_host() -> None:
        """Copy now and then, to bound the memory on the device without waiting often."""
        for name, rows in waiting.items():
            copied[name].append(torch.cat(rows).float().cpu())
        waiting.clear()

    kept_K = np.empty(0, np.int64) if kept_K is None else kept_K
    start = 0
    with evaluating(method, domain):
        for number, inputs in enumerate(batches, start=1):
            rows = slice(start, start + len(inputs))
            start = rows.stop
            with mixed_precision(inputs.device, bf16):
                features_ND = method.network.features(inputs)
                logits_NC = _at_least_float32(method.decide(features_ND))
                sigma_N = method.sigma(features_ND)
            found = {"probabilities": logits_NC.softmax(dim=1), "logits": logits_NC}
            if sigma_N is not None:
                found["sigma"] = sigma_N
            if extra is not None:
                found |= extra(features_ND, logits_NC, rows)
            own_K = kept_K[(kept_K >= rows.start) & (kept_K < rows.stop)] - rows.start
            if len(own_K):
                found["features"] = features_ND[torch.from_numpy(own_K).to(features_ND.device)]
            for name, values in found.items():
                waiting[name].append(values)
            if number % BATCHES_ON_DEVICE == 0:
                copy_to_host()
        copy_to_host()
    columns = {name: torch.cat(parts).numpy() for name, parts in copied.items()}
    no_rows_NC = np.empty((0, method.network.num_classes), np.float32)
    no_rows_KD = np.empty((0, method.network.dim), np.float32)
    return Outputs(
        columns.pop("probabilities", no_rows_NC),
        columns.pop("sigma", None),
        features_KD=columns.pop("features", no_rows_KD),
        logits_NC=columns.pop("logits", no_rows_NC),
        extra=columns,
    )


def _at_least_float32(logits_NC: Tensor) -> Tensor:
    """Keep float64, which the estimators use: the softmax of far rows overflows in float32."""
    return logits_NC if logits_NC.dtype == torch.float64 else logits_NC.float()


def gathered(outputs: Outputs, team: Team) -> Outputs:
    """Join the outputs of all processes, in the order of their ranks."""
    if team.size == 1:
        return outputs

    def gather(rows: Values) -> Values:
        return np.asarray(team.gather(rows), dtype=np.float32)

    return Outputs(
        gather(outputs.probabilities_NC),
        None if outputs.sigma_N is None else gather(outputs.sigma_N),
        {name: gather(values_N) for name, values_N in outputs.extra.items()},
        gather(outputs.features_KD),
        None if outputs.logits_NC is None else gather(outputs.logits_NC),
    )


def domain_at_start(config: Config) -> int:
    """Return the domain whose statistics the model before adaptation predicts the target with.

    A run that starts from another run's model knows the target already.
    """
    return SOURCE if config.model.start is None else TARGET


def mode_at_start(config: Config, mode: Mode) -> Mode:
    """Return the norm mode that the model before adaptation predicts with, given the run's."""
    return "mixed" if config.model.start is None and mode != "frozen" else mode


def watched_images(count: int, config: Config) -> NDArray[np.int64]:
    """Choose which of `count` target images have their predictions kept after every cycle."""
    order = numpy_generator(config.training.seed, "watched").permutation(count)
    return np.asarray(order[: config.guard.images])
