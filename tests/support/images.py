"""Small image folders: coloured noise; hues differ between classes and shift between domains."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HUES = {"apple": (200, 40, 40), "leaf": (40, 180, 60), "sky": (60, 90, 220)}


def write_domain(
    root: Path, per_class: int = 12, shift: int = 0, seed: int = 0, flat: bool = False
) -> Path:
    rng = np.random.default_rng(seed)
    for name, hue in HUES.items():
        folder = root if flat else root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = np.array(hue) + shift + rng.normal(0, 30, (12, 12, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / (f"{name}-{number}.png" if flat else f"{number}.png"))
    return root


@dataclass(frozen=True)
class Format:
    """An input format with ImageNet's normalisation."""

    image_size: int
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


def write_noise(path: Path, seed: int, side: int = 8) -> None:
    """Write an image of random pixels, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


TINY: dict[str, Any] = {
    "model.backbone": "small_cnn",
    "model.norm": "per_domain",
    "data.image_size": 8,
    "training.pretrain_steps": 12,
    "training.cycles": 3,
    "training.cycle_steps": 4,
    "training.pseudo_labels": "argmax",
    "training.settled": 0.0,
    "training.batch_size": 24,
    "training.log_every": 2,
    "training.learning_rate": 0.01,
    "training.device": "cpu",
    "method.num_samples": 4,
}


def tiny(**changed: Any) -> dict[str, Any]:
    """Return settings of a run that takes a second; `__` in a keyword stands for the dot."""
    settings = {**TINY, **{key.replace("__", "."): value for key, value in changed.items()}}
    if settings.get("method.name", "cvp") != "cvp":
        settings.pop("method.num_samples")
    return settings


def tiny_head(**changed: object) -> dict[str, Any]:
    """Settings of a run on a frozen backbone that takes a second."""
    return tiny(model__train="head", model__norm="auto", training__pretrain_steps=40, **changed)
