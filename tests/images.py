"""Small image folders for tests: coloured noise whose hue tells the class, shifted between the domains."""

from pathlib import Path

import numpy as np
from PIL import Image

HUES = {"apple": (200, 40, 40), "leaf": (40, 180, 60), "sky": (60, 90, 220)}


def write_domain(root: Path, per_class: int = 12, shift: int = 0, seed: int = 0, flat: bool = False) -> Path:
    rng = np.random.default_rng(seed)
    for name, hue in HUES.items():
        folder = root if flat else root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = np.array(hue) + shift + rng.normal(0, 30, (12, 12, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / (f"{name}-{number}.png" if flat else f"{number}.png"))
    return root


TINY = {
    "model.backbone": "small_cnn",
    "model.norm": "per_domain",
    "data.image_size": 8,
    "training.pretrain_steps": 12,
    "training.cycles": 3,
    "training.cycle_steps": 4,
    "training.batch_size": 24,
    "training.log_every": 2,
    "training.learning_rate": 0.01,
    "training.device": "cpu",
    "method.num_samples": 4,
}


def tiny(**changed: object) -> dict[str, object]:
    """Settings of a run that takes a second; `__` in a keyword stands for the dot."""
    settings = {**TINY, **{key.replace("__", "."): value for key, value in changed.items()}}
    if settings.get("method.name", "cvp") != "cvp":
        settings.pop("method.num_samples")
    return settings
