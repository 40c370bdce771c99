"""Make run folders with known content, without training."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from certvol.runs.checkpoint import write_tensors
from certvol.runs.environment import origin_of

HUES = ((200, 40, 40), (40, 180, 60), (60, 90, 220), (220, 200, 40))
NASTY = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"quotes' & <b>bold</b>",
    "=cmd|' /C calc'!A0",
    "日本語 — ünïcödé 🦆",
    "line\nbreak\rand\ttab",
    "\u202egnp.exe\u2028",
    "x" * 240,
    "{{ 7 * 7 }}{% raw %}",
]


def naive_first(share: float, count: int) -> int:
    """Count up to the least number of images that makes this share."""
    return next(k for k in range(1, count + 1) if k / count >= share - 1e-9)


@contextmanager
def rewrite_json(file: Path) -> Iterator[dict[str, Any]]:
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@dataclass
class MadeRun:
    path: Path
    target: Path
    classes: list[str]
    names: list[str]
    predicted_N: NDArray[np.int64]
    true_N: NDArray[np.int64]
    sigma_N: NDArray[np.float64]
    probability_N: NDArray[np.float64]
    labelled: bool
    extra: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def accepted(
        self, share: float, certainty_N: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_]:
        values = self.sigma_N if certainty_N is None else certainty_N
        threshold = sorted(values, reverse=True)[naive_first(share, len(values)) - 1]
        return np.asarray(values >= threshold)

    def accuracy(self, chosen_N: NDArray[np.bool_]) -> float:
        return float((self.predicted_N == self.true_N)[chosen_N].mean())


@dataclass
class Wanted:
    """What a made run should hold."""

    count: int = 60
    classes: list[str] = field(default_factory=lambda: ["apple", "leaf", "sky"])
    labelled: bool = True
    sigma: bool = True
    measures: bool = True
    features: bool = True
    names: list[str] = field(default_factory=list)
    side: int = 24
    seed: int = 0
    method: str = "cvp"
    noise: int = 25
    distinct: int = 1_000_000
    """How many images are drawn; the others are links to them, which is faster."""


def make_run(root: Path, **given: Any) -> MadeRun:
    """Make a run with the fields of `Wanted` as given."""
    wanted = Wanted(**given)
    count, classes, seed, side = wanted.count, wanted.classes, wanted.seed, wanted.side
    rng = np.random.default_rng(seed)
    path, target = root / "run", root / "target"
    (path / "cycles").mkdir(parents=True)
    true_N = np.sort(rng.integers(0, len(classes), count))
    sigma_N = rng.gamma(4, 0.25, count).round(2)  # with ties
    right_N = rng.random(count) < 0.35 + 0.6 * (sigma_N > np.median(sigma_N))
    predicted_N = np.where(right_N, true_N, (true_N + 1) % len(classes))
    probability_N = (0.4 + 0.6 * rng.random(count)).round(6)
    names = wanted.names or [f"{i:05d}.png" for i in range(count)]
    for i, name in enumerate(names):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if i >= wanted.distinct:
            file.hardlink_to(target / names[i % wanted.distinct])
        else:
            pixels = np.array(HUES[true_N[i] % len(HUES)]) + rng.normal(
                0, wanted.noise, (side, side, 3)
            )
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(file, "PNG", compress_level=1)

    settings = {
        "method": {"name": wanted.method, "num_samples": 16},
        "data": {"source": str(root / "source"), "target": str(target), "max_megapixels": 179.0},
        "model": {"backbone": "small_cnn", "norm": "mixed", "train": "head"},
        "training": {"cycles": 3, "seed": seed},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    delivered = {"why": "cycle 3, the last one", "norm": "mixed"}
    about = {"classes": classes, "delivered": "last", **delivered}
    for name in ("pretrained", "model"):
        write_tensors(path / f"{name}.safetensors", {"a": torch.zeros(1)}, about)
    environment: dict[str, Any] = {
        "device": {"name": "cpu"},
        "versions": {"torch": "2"},
        "commit": "abc",
    }
    environment["origin"] = origin_of(target)
    (path / "environment.json").write_text(json.dumps(environment))
    _write_lines(path / "timing.jsonl", [{"phase": "all", "seconds": 75.0}])
    _write_history(path, wanted.sigma)

    made = MadeRun(
        path, target, classes, names, predicted_N, true_N, sigma_N, probability_N, wanted.labelled
    )
    paths = [_cell(name, "./") for name in names]
    labels = [_cell(classes[i], "'") for i in predicted_N]
    truths = [_cell(classes[i], "'") if wanted.labelled else "" for i in true_N]
    sigmas = [f"{value:.9g}" if wanted.sigma else "" for value in sigma_N]
    columns: dict[str, Any] = {
        "path": paths,
        "label": labels,
        "probability": probability_N,
        "sigma": sigmas,
    }
    _write_table(path / "predictions.csv", columns)
    if wanted.labelled:
        delivered = {"model": "last", **delivered}
        adapted, before = (_accuracies(made, scale) for scale in (1.0, 0.5))
        metrics = {"source_only": before, "adapted": adapted, "delivered": delivered}
        (path / "metrics.json").write_text(json.dumps(metrics))
    if wanted.measures:
        made.extra["entropy"] = (rng.random(count) * 2).round(4)
        columns = {"path": paths, "prediction": labels, "truth": truths, "sigma": sigmas}
        columns |= {"probability": probability_N, "entropy": made.extra["entropy"]}
        for name in ("logit", "logit_gt", "logit_diff", "mcd_mu", "mcd_sigma"):
            columns[name] = [""] * count
        _write_table(path / "measures.csv", columns)
        (path / "evaluation.json").write_text(json.dumps(_evaluation(made, wanted.sigma)))
    if wanted.features:
        rows_n = np.sort(rng.permutation(count)[:2000])
        before_nD, noise_nD = rng.normal(size=(2, len(rows_n), 8))
        adapted_nD = np.eye(len(classes), 8)[true_N[rows_n]] * 6 + noise_nD
        tensors = {
            "indices": torch.from_numpy(rows_n),
            "pretrained": torch.from_numpy(before_nD).half(),
            "adapted": torch.from_numpy(adapted_nD).half(),
        }
        write_tensors(path / "features.safetensors", tensors)
    return made


def _cell(text: str, mark: str) -> str:
    return mark + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _write_table(file: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _accuracies(made: MadeRun, scale: float) -> dict[str, Any]:
    of_class = {name: made.true_N == i for i, name in enumerate(made.classes)}
    accuracy = scale * made.accuracy(np.ones(len(made.names), bool))
    return {
        "accuracy": accuracy,
        "mean_class_accuracy": accuracy,
        "per_class": {
            k: scale * made.accuracy(v) if v.any() else None for k, v in of_class.items()
        },
        "images": len(made.names),
    }


def _write_history(path: Path, sigma: bool) -> None:
    lines: list[dict[str, Any]] = []
    for phase, steps in (("pretrain", 12), ("adapt", 24)):
        for step in range(2, steps + 1, 2):
            line = {"phase": phase, "cycle": 0, "step": step, "lr": 0.01 / (1 + step)}
            line |= {"loss": 3 / step, "ce": 2 / step, "samples_ce": 1 / step}
            if sigma:
                line["sigma_source"] = 0.1 * step
                line["sigma_target"] = 0.05 * step if phase == "adapt" else None
            lines.append(line)
    _write_lines(path / "history.jsonl", lines)
    constant = {"classes_in_use": 2.5, "source_accuracy": 0.9}
    scores = [{"cycle": i, "agreement_with_pretrained": 1 - i / 10, **constant} for i in range(4)]
    _write_lines(path / "cycles" / "scores.jsonl", scores)


def _evaluation(made: MadeRun, sigma: bool) -> dict[str, object]:
    count = len(made.names)
    values = {"logit": 0.8, "mcd_sigma": -0.2}
    found: dict[str, object] = {
        "images": count,
        "labelled": made.labelled,
        "correlations": {"pearson": values, "spearman": values} if sigma else None,
        "oscillation": {"total": 1.5, "floor": 1.2, "images": 15, "points": 1000},
    }
    if not made.labelled:
        return found
    wrong_N = made.predicted_N != made.true_N
    certainties = {"probability": made.probability_N, **({"sigma": made.sigma_N} if sigma else {})}
    ranks_N = np.arange(1, count + 1)
    curves, aurc, at = {}, {}, {"0.8": 0.7, "0.9": 0.65, "0.95": 0.6}
    for name, certainty_N in certainties.items():
        risk_N = np.cumsum(wrong_N[np.argsort(-certainty_N, kind="stable")]) / ranks_N
        curves[name] = {"coverage": (ranks_N / count).tolist(), "risk": risk_N.tolist()}
        aurc[name] = float(risk_N.mean())
    bins: list[dict[str, float | None]] = [
        {
            "lower": i / 5,
            "upper": (i + 1) / 5,
            "images": 10 * i,
            "confidence": i / 5 + 0.1 if i else None,
            "accuracy": i / 5 if i else None,
        }
        for i in range(5)
    ]
    counts = np.zeros((len(made.classes),) * 2, int)
    np.add.at(counts, (made.true_N, made.predicted_N), 1)
    return found | {
        "accuracy": float(1 - wrong_N.mean()),
        "auroc": dict.fromkeys(certainties, 0.75),
        "risk_coverage": curves,
        "aurc": aurc,
        "accuracy_at_coverage": dict.fromkeys(certainties, at),
        "ece": 0.12,
        "reliability": bins,
        "confusion": {"classes": made.classes, "counts": counts.tolist()},
    }
