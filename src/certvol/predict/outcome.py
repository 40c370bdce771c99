"""Finish a run: predict and measure the target with both models, then write the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.data.views import Views
from certvol.device import evaluation_batch
from certvol.distributed import Team
from certvol.errors import RunFailed
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict import measures as measuring
from certvol.predict.estimates import Evidence, HeldOut, collect_evidence
from certvol.predict.forward import (
    Outputs,
    Values,
    domain_at_start,
    gathered,
    run_batches,
    watched_images,
)
from certvol.predict.measures import accuracy_figures
from certvol.predict.model import Model
from certvol.progress import Reporter
from certvol.randomness import numpy_generator
from certvol.runs.checkpoint import load_into, read_tensors, write_tensors
from certvol.runs.folder import RunFolder
from certvol.runs.tables import csv_text, json_text, label_cell, path_cell, write_text
from certvol.scores.metrics import accuracy, mean_class_accuracy
from certvol.scores.uncertainty import MEASURES

FEATURE_IMAGES = 2000  # how many images keep their features


@dataclass(frozen=True, eq=False)
class TargetOfRun:
    """The target images; `true_N` is None unless all of them have labels."""

    paths: list[str]
    views: Views
    true_N: Indices | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outputs of the delivered and the pretrained model for the target."""

    weights: dict[str, torch.Tensor]
    """The delivered weights."""
    adapted: Outputs
    adapted_KD: Values
    """Features of the images `shown_K`."""
    pretrained: Outputs
    """Outputs for all images if they have labels, else for `shown_K`; features of `shown_K`."""
    shown_K: Indices
    oscillation: dict[str, Any] | None
    evidence: Evidence
    """What is known about the images `shown_K` without labels."""

    def at_temperature(self, temperature: float) -> "Outcome":
        """Divide the delivered model's logits by a temperature."""
        return replace(self, adapted=self.adapted.at_temperature(temperature))


def feature_images(count: int, seed: int) -> Indices:
    """Choose which of `count` images keep their features, in ascending order."""
    return np.sort(numpy_generator(seed, "features").permutation(count)[:FEATURE_IMAGES])


def run_target(
    run: RunFolder,
    model: Model,
    target: TargetOfRun,
    held_out: HeldOut,
    team: Team,
    reporter: Reporter,
) -> Outcome:
    """Pass target and held-out source through the delivered model, then the pretrained one.

    `model` holds the delivered weights before and the pretrained ones afterwards.
    """
    count, seed = len(target.paths), model.config.training.seed
    method, true_N = model.method, target.true_N
    all_N, shown_K, picked_K = np.arange(count), feature_images(count, seed), np.arange(0)
    if true_N is not None:
        picked_K = measuring.oscillation_images(true_N, seed)
    if not measuring.oscillation_is_cheap(len(picked_K), method):
        picked_K = picked_K[:0]
    kept_K, images_S = np.union1d(shown_K, picked_K), held_out.images_S
    passes = _Passes(model, target, team, reporter)

    of_source = "predicting held-out source images"
    adapted = passes.run("predicting the target", TARGET, all_N, kept_K)
    judged_S = images_S[:0] if method.closed_form else images_S
    adapted_S = passes.run(of_source, SOURCE, judged_S, judged_S)
    oscillation = None
    if len(picked_K) and team.main:
        picked_KD = adapted.features_KD[np.searchsorted(kept_K, picked_K)]
        oscillation = measuring.oscillation(picked_KD, method)
    weights = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    adapted_KD = adapted.features_KD[np.searchsorted(kept_K, shown_K)]
    load_into(method, read_tensors(run.pretrained), run.pretrained.name)
    images_P = shown_K if true_N is None else all_N
    of_target = "predicting with the model before adaptation"
    pretrained = passes.run(of_target, TARGET, images_P, shown_K, before=True)
    pretrained_S = passes.run(of_source, SOURCE, images_S, images_S)
    shown_of_P = shown_K if len(images_P) == count else np.arange(len(shown_K))
    before_K, after_K = pretrained.rows(shown_of_P), adapted.rows(shown_K)
    evidence = collect_evidence(held_out.labels_S, pretrained_S, before_K, adapted_S, after_K)
    return Outcome(weights, adapted, adapted_KD, pretrained, shown_K, oscillation, evidence)


@dataclass(frozen=True)
class _Passes:
    """Passes images through the model's present weights; the processes share the work."""

    model: Model
    images: TargetOfRun
    team: Team
    reporter: Reporter

    def run(
        self, what: str, domain: int, images_P: Indices, kept_K: Indices, before: bool = False
    ) -> Outputs:
        """Predict images of a domain.

        The model `before` adaptation predicts with its own statistics, without measures of
        certainty.
        """
        method, settings = self.model.method, self.model.config.training
        mine_P = images_P[self.team.share(len(images_P))]
        own_kept = np.flatnonzero(np.isin(mine_P, kept_K))
        size = evaluation_batch(self.model.device)
        batches = self.images.views.test_batches(domain, mine_P, size)
        self.reporter.start(what, len(images_P))
        if before:
            norm_domain = domain_at_start(self.model.config)
            outputs = run_batches(method, batches, norm_domain, kept_K=own_kept)
        else:
            true_N = self.images.true_N if domain == TARGET else None
            own_true = None if true_N is None else true_N[mine_P]
            outputs = measuring.run_with_measures(
                method, batches, domain, settings, own_true, own_kept
            )
        outputs = gathered(outputs, self.team)
        self.reporter.advance(len(images_P))
        self.reporter.finish()
        if not outputs.finite:
            raise RunFailed(
                f"the model's predictions for the {('source', 'target')[domain]} are not finite: "
                f"lower `training.learning_rate` (now {settings.learning_rate:g}) or set "
                "`training.grad_clip 10`"
            )
        return outputs


def run_metrics(
    run: RunFolder,
    model: Model,
    target: TargetOfRun,
    outcome: Outcome,
    delivered: Mapping[str, str],
) -> dict[str, Any] | None:
    """Return the content of metrics.json, or None without labels."""
    true_N = target.true_N
    if true_N is None:
        return None
    watched_N = true_N[watched_images(len(true_N), model.config)]
    cycles = [
        (cycle, probabilities_NC.argmax(axis=1))
        for cycle, _, probabilities_NC in run.journal.read_cycles()
    ]
    classes, start = len(model.classes), model.config.model.start
    return {
        **({} if start is None else {"start": start}),
        "source_only": accuracy_figures(outcome.pretrained.labels_N, true_N, model.classes),
        "adapted": accuracy_figures(outcome.adapted.labels_N, true_N, model.classes),
        "delivered": dict(delivered),
        "watched": {
            "images": len(watched_N),
            "cycles": [cycle for cycle, _ in cycles],
            "accuracy": [accuracy(labels_N, watched_N) for _, labels_N in cycles],
            "mean_class_accuracy": [
                mean_class_accuracy(labels_N, watched_N, classes) for _, labels_N in cycles
            ],
        },
    }


def write_outcome(
    run: RunFolder,
    classes: list[str],
    target: TargetOfRun,
    outcome: Outcome,
    metrics: dict[str, Any] | None,
) -> None:
    """Write every file of a finished run except its weights, which mark it as complete."""
    adapted, true_N = outcome.adapted, target.true_N
    write_text(run.predictions, predictions_csv(target.paths, classes, adapted))
    if metrics is not None:
        run.write_json(run.metrics, metrics)
    write_text(run.measures, measures_csv(target.paths, classes, adapted, true_N))
    figures = measuring.certainty_figures(adapted, classes, true_N, outcome.oscillation)
    # Without indentation: the confusion matrix of many classes would be mostly spaces.
    write_text(run.evaluation, json_text(figures, separators=(",", ":")))
    row_of = np.empty(len(target.paths), np.int64)
    row_of[path_order(target.paths)] = np.arange(len(target.paths))
    tensors = {
        "indices": torch.from_numpy(row_of[outcome.shown_K]),
        "pretrained": _float16(outcome.pretrained.features_KD),
        "adapted": _float16(outcome.adapted_KD),
    }
    write_tensors(run.features, tensors)


def _float16(values: Values) -> torch.Tensor:
    """Convert to float16, with its largest number for larger values."""
    most = float(np.finfo(np.float16).max)
    return torch.from_numpy(values.clip(-most, most)).to(torch.float16)


def path_order(paths: Sequence[str]) -> list[int]:
    """Return the order of the rows of predictions.csv and measures.csv."""
    return sorted(range(len(paths)), key=paths.__getitem__)


def predictions_csv(
    paths: list[str],
    classes: list[str],
    outputs: Outputs,
    accepted: NDArray[np.bool_] | None = None,
    measure: str | None = None,
) -> str:
    """Return a table of path, label, probability and sigma, plus any columns asked for.

    A probability has four decimals, because no calibration is finer. Other values have nine
    digits, enough to read back the same float.
    """
    header = ["path", "label", "probability", "sigma"]
    columns = [outputs.sigma_N]
    if measure is not None:
        header.append(measure)
        columns.append(outputs.measures[measure])
    if accepted is not None:
        header.append("accepted")
    labels_N, confidence_N = outputs.labels_N, outputs.confidence_N

    def cells(i: int) -> list[str]:
        numbers = ["" if column is None else f"{column[i]:.9g}" for column in columns]
        decision = [] if accepted is None else [str(bool(accepted[i])).lower()]
        probability = f"{confidence_N[i]:.4f}"
        label = label_cell(classes[labels_N[i]])
        return [path_cell(paths[i]), label, probability, *numbers, *decision]

    return csv_text(header, map(cells, path_order(paths)))


def measures_csv(
    paths: Sequence[str], classes: Sequence[str], outputs: Outputs, true_N: Indices | None
) -> str:
    labels_N = outputs.labels_N
    columns = [outputs.measures.get(name) for name in MEASURES]

    def cells(i: int) -> list[str]:
        truth = "" if true_N is None else label_cell(classes[true_N[i]])
        numbers = ["" if column is None else f"{column[i]:.9g}" for column in columns]
        return [path_cell(paths[i]), label_cell(classes[labels_N[i]]), truth, *numbers]

    return csv_text(["path", "prediction", "truth", *MEASURES], map(cells, path_order(paths)))
