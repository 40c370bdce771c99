"""Run folders made by hand, in the form that runs leave them: small, of known content, and as hostile as a test wants."""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from certvol.training.checkpoint import write_tensors

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
    """How many images at least make this share, counted up one by one."""
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

    def accepted(self, share: float, certainty_N: NDArray[np.float64] | None = None) -> NDArray[np.bool_]:
        values = self.sigma_N if certainty_N is None else certainty_N
        threshold = sorted(values, reverse=True)[naive_first(share, len(values)) - 1]
        return values >= threshold

    def accuracy(self, chosen_N: NDArray[np.bool_]) -> float:
        return float((self.predicted_N == self.true_N)[chosen_N].mean())


def make_run(
    root: Path,
    count: int = 60,
    classes: list[str] | None = None,
    *,
    labelled: bool = True,
    sigma: bool = True,
    measures: bool = True,
    features: bool = True,
    names: list[str] | None = None,
    side: int = 24,
    seed: int = 0,
    method: str = "cvp",
    noise: int = 25,
    distinct: int = 1_000_000,
) -> MadeRun:
    rng = np.random.default_rng(seed)
    classes = classes or ["apple", "leaf", "sky"]
    path, target = root / "run", root / "target"
    (path / "cycles").mkdir(parents=True)
    true_N = np.sort(rng.integers(0, len(classes), count))
    sigma_N = rng.gamma(4, 0.25, count).round(2)  # with ties
    right_N = rng.random(count) < 0.35 + 0.6 * (sigma_N > np.median(sigma_N))
    predicted_N = np.where(right_N, true_N, (true_N + 1) % len(classes))
    probability_N = (0.4 + 0.6 * rng.random(count)).round(6)
    if names is None:
        names = [f"{i:05d}.png" for i in range(count)]
    _write_images(target, names, true_N, side, rng, noise, distinct)

    settings = {
        "method": {"name": method, "num_samples": 16},
        "data": {"source": str(root / "source"), "target": str(target), "max_megapixels": 179.0},
        "model": {"backbone": "small_cnn", "norm": "mixed"},
        "training": {"cycles": 3, "seed": seed},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    about = {
        "format": "certvol/1",
        "classes": classes,
        "norm": "mixed",
        "delivered": "last",
        "why": "cycle 3, the last one",
    }
    write_tensors(path / "model.safetensors", {"a": torch.zeros(1)}, about)
    (path / "environment.json").write_text(
        json.dumps({"device": {"name": "cpu"}, "versions": {"torch": "2"}, "commit": "abc"})
    )
    (path / "timing.jsonl").write_text('{"phase": "all", "seconds": 75.0}\n')
    _write_history(path, sigma)

    def cell(text: str, mark: str) -> str:
        return mark + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text

    paths = [cell(name, "./") for name in names]
    labels = [cell(classes[i], "'") for i in predicted_N]
    sigmas = [f"{value:.9g}" if sigma else "" for value in sigma_N]
    rows = [[p, label, f"{q:.9g}", s] for p, label, q, s in zip(paths, labels, probability_N, sigmas, strict=True)]
    (path / "predictions.csv").write_text(_csv(["path", "label", "probability", "sigma"], rows))
    made = MadeRun(path, target, classes, names, predicted_N, true_N, sigma_N, probability_N, labelled)
    if labelled:
        accuracy = made.accuracy(np.ones(count, bool))
        per_class = {
            name: float((predicted_N == true_N)[true_N == i].mean()) if (true_N == i).any() else None
            for i, name in enumerate(classes)
        }
        figures = {"accuracy": accuracy, "mean_class_accuracy": accuracy, "per_class": per_class, "images": count}
        before = {
            **figures,
            "accuracy": accuracy / 2,
            "per_class": {k: None if v is None else v / 2 for k, v in per_class.items()},
        }
        delivered = {"model": "last", "why": "cycle 3, the last one", "norm": "mixed"}
        (path / "metrics.json").write_text(
            json.dumps({"source_only": before, "adapted": figures, "delivered": delivered})
        )
    if measures:
        made.extra["entropy"] = (rng.random(count) * 2).round(4)
        truths = [cell(classes[i], "'") if labelled else "" for i in true_N]
        measured = [
            [p, label, truth, f"{q:.9g}", f"{e:.9g}", s, "", "", "", "", ""]
            for p, label, truth, q, e, s in zip(
                paths, labels, truths, probability_N, made.extra["entropy"], sigmas, strict=True
            )
        ]
        head = "path prediction truth probability entropy sigma logit logit_gt logit_diff mcd_mu mcd_sigma".split()
        (path / "measures.csv").write_text(_csv(head, measured))
        (path / "evaluation.json").write_text(json.dumps(_evaluation(made, sigma)))
    if features:
        rows_n = np.sort(rng.permutation(count)[: min(count, 2000)])
        centres = np.eye(len(classes), 8) * 6
        tensors = {
            "indices": torch.from_numpy(rows_n),
            "pretrained": torch.from_numpy(rng.normal(size=(len(rows_n), 8))).half(),
            "adapted": torch.from_numpy(centres[true_N[rows_n]] + rng.normal(size=(len(rows_n), 8))).half(),
        }
        write_tensors(path / "features.safetensors", tensors, {"format": "certvol/1"})
    return made


def _csv(head: list[str], rows: list[list[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([head, *rows])
    return text.getvalue()


def _write_images(
    target: Path,
    names: list[str],
    true_N: NDArray[np.int64],
    side: int,
    rng: np.random.Generator,
    noise: int,
    distinct: int,
) -> None:
    for i, (name, label) in enumerate(zip(names, true_N, strict=True)):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if i >= distinct:  # drawing takes longer than all else: the same picture once more
            file.hardlink_to(target / names[i % distinct])
            continue
        pixels = np.array(HUES[label % len(HUES)]) + rng.normal(0, noise, (side, side, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG", compress_level=1)


def _write_history(path: Path, sigma: bool) -> None:
    lines = []
    for phase, steps in (("pretrain", 12), ("adapt", 24)):
        for step in range(2, steps + 1, 2):
            line = {
                "phase": phase,
                "cycle": 0,
                "step": step,
                "lr": 0.01 / (1 + step),
                "loss": 3 / step,
                "ce": 2 / step,
                "samples_ce": 1 / step,
            }
            if sigma:
                line |= {"sigma_source": 0.1 * step, "sigma_target": 0.05 * step if phase == "adapt" else None}
            lines.append(json.dumps(line))
    (path / "history.jsonl").write_text("\n".join(lines) + "\n")
    scores = [
        {"cycle": i, "classes_in_use": 2.5, "agreement_with_pretrained": 1 - i / 10, "source_accuracy": 0.9}
        for i in range(4)
    ]
    (path / "cycles" / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))


def _evaluation(made: MadeRun, sigma: bool) -> dict[str, object]:
    count = len(made.names)
    found: dict[str, object] = {
        "images": count,
        "labelled": made.labelled,
        "correlations": {k: {"logit": 0.8, "mcd_sigma": -0.2} for k in ("pearson", "spearman")} if sigma else None,
        "oscillation": {"total": 1.5, "floor": 1.2, "images": 15, "points": 1000},
    }
    if not made.labelled:
        return found
    wrong_N = made.predicted_N != made.true_N
    names = ["probability", "sigma"] if sigma else ["probability"]
    curves, aurc, at = {}, {}, {}
    for name in names:
        order = np.argsort(-(made.sigma_N if name == "sigma" else made.probability_N), kind="stable")
        risk = np.cumsum(wrong_N[order]) / np.arange(1, count + 1)
        curves[name] = {"coverage": (np.arange(1, count + 1) / count).tolist(), "risk": risk.tolist()}
        aurc[name] = float(risk.mean())
        at[name] = {"0.8": 0.7, "0.9": 0.65, "0.95": 0.6}
    counts = np.zeros((len(made.classes),) * 2, int)
    np.add.at(counts, (made.true_N, made.predicted_N), 1)
    return found | {
        "accuracy": float(1 - wrong_N.mean()),
        "auroc": dict.fromkeys(names, 0.75),
        "risk_coverage": curves,
        "aurc": aurc,
        "accuracy_at_coverage": at,
        "ece": 0.12,
        "reliability": [
            {
                "lower": i / 5,
                "upper": (i + 1) / 5,
                "images": 10 * i,
                "confidence": i / 5 + 0.1 if i else None,
                "accuracy": i / 5 if i else None,
            }
            for i in range(5)
        ],
        "confusion": {"classes": made.classes, "counts": counts.tolist()},
    }
