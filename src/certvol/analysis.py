"""What a model's certainty is worth: measures of every image, and the figures that follow from them.

`measures.csv`, a row per target image in the order of predictions.csv: path, prediction, truth, and a column per measure of
`uncertainty.MEASURES`; empty where there is none (no labels: truth, logit_gt; a method without sigma: sigma).

`evaluation.json`, and what `certvol evaluate --json` writes beside the accuracies. Fractions, not percent; null where a figure
does not exist (a correlation with a constant, an AUROC where nothing is wrong). Keys in brackets are there with labels only.

    images, labelled          how many; whether labels were there
    measures                  measure -> title, higher_is_certain, needs_labels, median
    correlations              pearson, spearman -> of sigma with logit, (logit_gt), logit_diff, mcd_mu, mcd_sigma, each turned
                              so that more is more certain; null for a method without sigma
    thresholds                measure -> coverage ("0.9") -> least certain value that is accepted, in the measure's own units
    (accuracy)                of all images
    (auroc)                   measure -> of telling right predictions from wrong ones
    (risk_coverage)           measure -> coverage, risk: lists of at most 200 points
    (aurc)                    measure -> area under it
    (accuracy_at_coverage)    measure -> coverage -> accuracy of that most certain share
    (ece, reliability)        calibration of the largest probability: error; bins of lower, upper, images, confidence, accuracy
    (confusion)               classes, counts: a row per true class, a column per predicted one
    (oscillation)             where computed: total, floor, images, points
    (unknown)                 with --unknown: images, and auroc, fpr_at_95_tpr: measure -> of telling known from unknown images

`features.safetensors`: `pretrained` and `adapted` features (float16) of the images in the rows `indices` of predictions.csv.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol import metrics, uncertainty
from certvol.config import TrainingConfig
from certvol.errors import UserError
from certvol.inference import Outputs, evaluating
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.heads import Classifier
from certvol.seeding import numpy_generator, torch_seed
from certvol.tables import csv_text, name_cell, write_text
from certvol.training.checkpoint import FORMAT, write_tensors
from certvol.training.distributed import Team
from certvol.uncertainty import COMPARED_WITH_SIGMA, LABEL_FREE, MEASURES

Indices = NDArray[np.int64]
Values = NDArray[np.float32]
COVERAGES = (0.8, 0.9, 0.95)
THRESHOLD_COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
CURVE_POINTS = 200
FEATURE_IMAGES = 2000
OSCILLATION_PER_CLASS, OSCILLATION_POINTS = 5, 1000
NO_OSCILLATION = "it is that of a classifier of one or two linear layers, and this method has another"
# Multiplications that an oscillation may take at the end of a run, where nobody has asked for it: seconds.
OSCILLATION_FREE = {"cpu": 1e11, "cuda": 1e14}


@dataclass(frozen=True)
class Measured:
    """Of N images, on the CPU."""

    predicted_N: Indices
    values: dict[str, Values]
    """By measure; those that do not exist here are missing."""
    features_KD: Values
    """Of the images that were asked for."""

    def certainty(self, measure: str) -> Values:
        """Its values, turned where need be so that more is more certain."""
        return certainty(measure, self.values[measure])

    @property
    def labels_N(self) -> Indices:
        return self.predicted_N

    @property
    def confidence_N(self) -> Values:
        return self.values["probability"]

    @property
    def sigma_N(self) -> Values | None:
        return self.values.get("sigma")

    @property
    def label_free(self) -> list[str]:
        return [name for name in LABEL_FREE if name in self.values]


def certainty(measure: str, values_N: Values) -> Values:
    return values_N if MEASURES[measure].more_is_certain else -values_N


def linear_layers(method: AdaptationMethod) -> list[tuple[Tensor, Tensor]] | None:
    """Weight and bias of each linear layer of f_Cl; None for a method that has another head or none of layers at all."""
    classifier = method.network.classifier
    if type(classifier) is not Classifier or type(method).logits is not AdaptationMethod.logits:
        return None
    linear = [layer for layer in (classifier.hidden, classifier.output) if layer is not None]
    return [(layer.weight.detach(), layer.bias.detach()) for layer in linear]


def measure(
    method: AdaptationMethod,
    batches: Iterable[Tensor],
    statistics: int,
    settings: TrainingConfig,
    true_N: Indices | None = None,
    kept_K: Indices | None = None,
) -> Measured:
    """One pass, the backbone once per image. `batches`: normalised images, or features, on the model's device. `kept_K`: images,
    ascending, whose features to keep. Rows go to the host batch by batch: memory on the device does not grow with the images."""
    mc_dropout = _mc_dropout(method, settings)
    kept_K = np.empty(0, np.int64) if kept_K is None else kept_K
    predicted: list[Tensor] = []
    rows: list[Tensor] = []
    features: list[Tensor] = []
    names: list[str] = []
    start = 0
    with evaluating(method, statistics):
        for images_NCHW in batches:
            features_ND = method.network.features(images_NCHW).float()
            logits_NC = method.logits(features_ND).float()
            stop = start + len(images_NCHW)
            by_name = {
                "probability": uncertainty.top_probability(logits_NC),
                "entropy": uncertainty.entropy(logits_NC),
                "logit": uncertainty.top_logit(logits_NC),
                "logit_diff": uncertainty.top_two_difference(logits_NC),
            }
            by_name["mcd_mu"], by_name["mcd_sigma"] = mc_dropout(features_ND)
            if (sigma_N := method.sigma(features_ND)) is not None:
                by_name["sigma"] = sigma_N.float()
            if true_N is not None:
                labels_N = torch.from_numpy(true_N[start:stop]).to(logits_NC.device)
                by_name["logit_gt"] = uncertainty.true_logit(logits_NC, labels_N)
            names = list(by_name)
            rows.append(torch.stack(list(by_name.values()), dim=1).cpu())
            predicted.append(logits_NC.argmax(dim=1).cpu())
            inside = kept_K[(kept_K >= start) & (kept_K < stop)] - start
            if len(inside):
                features.append(features_ND[torch.from_numpy(inside).to(features_ND.device)].cpu())
            start = stop
    columns = torch.cat(rows).numpy().T if rows else np.empty((0, 0), np.float32)
    width = method.network.info.dim
    return Measured(
        torch.cat(predicted).numpy() if predicted else np.empty(0, np.int64),
        {name: np.ascontiguousarray(column) for name, column in zip(names, columns, strict=True)},
        torch.cat(features).numpy() if features else np.empty((0, width), np.float32),
    )


def _mc_dropout(method: AdaptationMethod, settings: TrainingConfig) -> Callable[[Tensor], uncertainty.MCDropout]:
    """Of a plain classifier with the same masks for all images; of another head with masks of its own for each batch."""
    seed, layers = torch_seed(settings.seed, "measures.dropout"), linear_layers(method)
    if layers is not None:
        masks = uncertainty.dropout_masks(layers, settings.mc_passes, settings.mc_dropout, seed)
        return lambda features_ND: uncertainty.mc_dropout(features_ND, layers, masks)

    def by_passes(features_ND: Tensor) -> uncertainty.MCDropout:
        with torch.random.fork_rng(devices=[features_ND.device] if features_ND.device.type == "cuda" else []):
            torch.manual_seed(seed)
            logits = (method.logits(features_ND, settings.mc_dropout) for _ in range(settings.mc_passes))
            return uncertainty.mean_and_deviation(one.double().softmax(dim=1) for one in logits)

    return by_passes


def features(method: AdaptationMethod, batches: Iterable[Tensor], statistics: int) -> Values:
    """N x D, on the CPU."""
    found: list[Tensor] = []
    with evaluating(method, statistics):
        found += [method.network.features(images_NCHW).float().cpu() for images_NCHW in batches]
    return torch.cat(found).numpy() if found else np.empty((0, method.network.info.dim), np.float32)


def gathered(measured: Measured, team: Team) -> Measured:
    """Of all processes' shares, in order."""
    if team.size == 1:
        return measured
    return Measured(
        np.asarray(team.gather(measured.predicted_N), dtype=np.int64),
        {name: np.asarray(team.gather(values), dtype=np.float32) for name, values in measured.values.items()},
        np.asarray(team.gather(measured.features_KD), dtype=np.float32),
    )


def measured_by(outputs: Outputs) -> Measured:
    """What predictions alone tell."""
    values = {"probability": outputs.confidence_N}
    if outputs.sigma_N is not None:
        values["sigma"] = outputs.sigma_N
    return Measured(outputs.labels_N, values, np.empty((0, 0), np.float32))


def agreeing(measured: Measured, outputs: Outputs) -> Measured:
    """With what the predictions say themselves, to the last digit: the two may come from batches of other sizes."""
    told = measured_by(outputs)
    return replace(measured, predicted_N=told.predicted_N, values={**measured.values, **told.values})


def feature_images(count: int, seed: int) -> Indices:
    """Ascending: which of `count` images show their features."""
    return np.sort(numpy_generator(seed, "features").permutation(count)[:FEATURE_IMAGES])


# --- figures -----------------------------------------------------------------------------------------------------------


def figures(
    measured: Measured,
    classes: Sequence[str],
    true_N: Indices | None,
    oscillation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of evaluation.json."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "images": len(measured.predicted_N),
        "labelled": true_N is not None,
        "measures": {
            name: {
                "title": about.title,
                "higher_is_certain": about.more_is_certain,
                "needs_labels": about.needs_labels,
                "median": _number(np.median(measured.values[name])),
            }
            for name, about in MEASURES.items()
            if name in measured.values
        },
        "correlations": _correlations(measured),
        "thresholds": {name: thresholds(name, measured.values[name]) for name in measured.label_free},
    }
    if true_N is not None:
        found |= _labelled_figures(measured, classes, true_N)
    if oscillation is not None:
        found["oscillation"] = dict(oscillation)
    return found


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _correlations(measured: Measured) -> dict[str, dict[str, float | None]] | None:
    if "sigma" not in measured.values:
        return None
    sigma_N = measured.certainty("sigma")
    others = {name: measured.certainty(name) for name in COMPARED_WITH_SIGMA if name in measured.values}
    return {
        "pearson": {name: _number(metrics.pearson(sigma_N, other_N)) for name, other_N in others.items()},
        "spearman": {name: _number(metrics.spearman(sigma_N, other_N)) for name, other_N in others.items()},
    }


def thresholds(measure: str, values_N: Values) -> dict[str, float]:
    """Coverage -> the value by which that share of these images is accepted, in the measure's own units."""
    sign = 1.0 if MEASURES[measure].more_is_certain else -1.0
    certainty_N = certainty(measure, values_N)
    return {f"{share:g}": sign * metrics.threshold_at(certainty_N, share) for share in THRESHOLD_COVERAGES}


def _labelled_figures(measured: Measured, classes: Sequence[str], true_N: Indices) -> dict[str, Any]:
    right_N = measured.predicted_N == true_N
    bins = metrics.reliability(measured.values["probability"], right_N)
    turned = {name: measured.certainty(name) for name in measured.label_free}
    return {
        "accuracy": _number(right_N.mean()),
        "auroc": {name: _number(metrics.auroc(values_N, right_N)) for name, values_N in turned.items()},
        "risk_coverage": {name: _curve(values_N, ~right_N) for name, values_N in turned.items()},
        "aurc": {name: _number(metrics.aurc(values_N, ~right_N)) for name, values_N in turned.items()},
        "accuracy_at_coverage": {
            name: {
                f"{share:g}": _number(metrics.accuracy_at_coverage(values_N, ~right_N, share)) for share in COVERAGES
            }
            for name, values_N in turned.items()
        },
        "ece": _number(metrics.calibration_error(bins)),
        "reliability": [
            {**each._asdict(), "confidence": _number(each.confidence), "accuracy": _number(each.accuracy)}
            for each in bins
        ],
        "confusion": {
            "classes": list(classes),
            "counts": metrics.confusion_matrix(measured.predicted_N, true_N, len(classes)).tolist(),
        },
    }


def _curve(certainty_N: Values, wrong_N: NDArray[np.bool_]) -> dict[str, list[float]]:
    """Evenly spread points of the curve, its last one among them."""
    coverage_N, risk_N = metrics.risk_coverage(certainty_N, wrong_N)
    shown = np.unique(np.linspace(0, len(risk_N) - 1, min(CURVE_POINTS, len(risk_N))).round().astype(np.int64))
    return {"coverage": coverage_N[shown].tolist(), "risk": risk_N[shown].tolist()}


def open_set(known: Measured, unknown: Measured) -> dict[str, Any]:
    """How well each measure tells images of the model's classes from images of none of them."""
    both = {
        name: np.concatenate([known.certainty(name), unknown.certainty(name)])
        for name in known.label_free
        if name in unknown.values
    }
    is_known = np.arange(len(known.predicted_N) + len(unknown.predicted_N)) < len(known.predicted_N)
    return {
        "images": len(unknown.predicted_N),
        "auroc": {name: _number(metrics.auroc(values_N, is_known)) for name, values_N in both.items()},
        "fpr_at_95_tpr": {name: _number(metrics.fpr_at_tpr(values_N, is_known)) for name, values_N in both.items()},
    }


def oscillation_images(true_N: Indices, seed: int) -> Indices:
    return metrics.pick_per_class(true_N, OSCILLATION_PER_CLASS, seed)


def oscillation(features_ND: Values, method: AdaptationMethod) -> dict[str, Any]:
    """Of the decision boundary between these images, on the method's device."""
    layers = linear_layers(method)
    if layers is None:
        raise UserError(f"there is no oscillation: {NO_OSCILLATION}")
    features = torch.from_numpy(features_ND).to(layers[0][0].device)
    total, floor = metrics.oscillation(features, layers, num_points=OSCILLATION_POINTS)
    return {"total": total, "floor": floor, "images": len(features_ND), "points": OSCILLATION_POINTS}


def oscillation_is_cheap(images: int, method: AdaptationMethod) -> bool:
    """Also False where there is none."""
    if (layers := linear_layers(method)) is None:
        return False
    last = layers[-1][0]
    per_point = last.numel() if len(layers) > 1 else len(last)  # the first layer is interpolated, not multiplied
    cost = images * (images - 1) / 2 * OSCILLATION_POINTS * per_point
    return cost <= OSCILLATION_FREE.get(last.device.type, 0.0)


# --- files -------------------------------------------------------------------------------------------------------------


def rows_by_path(paths: Sequence[str]) -> list[int]:
    """The order of the rows of predictions.csv."""
    return sorted(range(len(paths)), key=paths.__getitem__)


def write_measures(
    path: Path, paths: Sequence[str], classes: Sequence[str], measured: Measured, true_N: Indices | None
) -> None:
    """Nine digits, so that a value read back is the float it was."""

    def cells(i: int) -> list[str]:
        truth = "" if true_N is None else name_cell(classes[true_N[i]], "'")
        figures = [f"{measured.values[name][i]:.9g}" if name in measured.values else "" for name in MEASURES]
        return [name_cell(paths[i], "./"), name_cell(classes[measured.predicted_N[i]], "'"), truth, *figures]

    write_text(path, csv_text(["path", "prediction", "truth", *MEASURES], map(cells, rows_by_path(paths))))


def write_evaluation(path: Path, found: Mapping[str, Any]) -> None:
    """Without indentation: a confusion matrix of many classes would be mostly spaces."""
    write_text(path, json.dumps(found, separators=(",", ":")) + "\n")


def write_features(
    path: Path, paths: Sequence[str], images_K: Indices, pretrained_KD: Values, adapted_KD: Values
) -> None:
    """float16, its largest number where a feature is larger. `indices`: rows of predictions.csv."""
    row_of = np.empty(len(paths), np.int64)
    row_of[rows_by_path(paths)] = np.arange(len(paths))
    most = float(np.finfo(np.float16).max)
    tensors = {
        "indices": torch.from_numpy(row_of[images_K]),
        "pretrained": torch.from_numpy(pretrained_KD.clip(-most, most)).to(torch.float16),
        "adapted": torch.from_numpy(adapted_KD.clip(-most, most)).to(torch.float16),
    }
    write_tensors(path, tensors, {"format": FORMAT})
