"""Write run folders without training, and read the files of runs."""

import csv
import json
from pathlib import Path

import numpy as np
import torch

from certvol.runs.checkpoint import write_tensors


def write_run(
    folder: Path,
    accuracy: list[float],
    scores: dict[str, list[float]] | None = None,
    delivered: tuple[str, float | None] = ("last", None),
    probabilities: list[np.ndarray] | None = None,
    collapsed: tuple[int, ...] = (),
) -> Path:
    """Write the files of a run that a benchmark reads.

    `accuracy` is that on the watched images, before adaptation and after each cycle; a single value
    makes a run that does not adapt. `delivered` is a model and its accuracy on the whole target; by
    default the last watched one.
    """
    model, adapted = delivered
    (folder / "cycles").mkdir(parents=True)
    (folder / "config.yaml").write_text("model:\n  backbone: small_cnn\n")
    figures = {"per_class": {"a": 0.5, "b": None}, "images": 4}
    whole = accuracy[-1] if adapted is None else adapted
    metrics = {
        "source_only": {"accuracy": accuracy[0], "mean_class_accuracy": accuracy[0], **figures},
        "adapted": {"accuracy": whole, "mean_class_accuracy": whole / 2, **figures},
        "delivered": {"model": model, "why": "", "norm": "mixed"},
        "watched": {
            "images": 4,
            "cycles": list(range(len(accuracy))) if len(accuracy) > 1 else [],
            "accuracy": accuracy,
            "mean_class_accuracy": [value / 2 for value in accuracy],
        },
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    lines = []
    for cycle in range(len(accuracy)):
        values = {name: row[cycle - 1] if cycle else 0.0 for name, row in (scores or {}).items()}
        lines.append(json.dumps({"cycle": cycle, **values, "collapsed": cycle in collapsed}))
        p = probabilities[cycle] if probabilities else np.eye(2, dtype=np.float32)
        place = folder / "cycles" / f"{cycle:04d}.safetensors"
        write_tensors(place, {"probabilities": torch.from_numpy(p)})
    (folder / "cycles" / "scores.jsonl").write_text(
        "\n".join(lines) + "\n" if len(accuracy) > 1 else ""
    )
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def weights(run: Path, name: str = "model.safetensors") -> bytes:
    return (run / name).read_bytes()


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
