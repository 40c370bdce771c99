"""Adapt a classifier from labelled source to unlabelled target images, with a certainty per image.

run = certvol.adapt(source, target, out=...)
model = certvol.load(run.path)
model.predict(images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from certvol.api import Run, adapt, evaluate
    from certvol.predict.model import Model, Prediction, load

__all__ = ["Model", "Prediction", "Run", "adapt", "evaluate", "load"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import certvol` and `certvol --help` must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'certvol' has no attribute {name!r}")
    home = "api" if name in ("Run", "adapt", "evaluate") else "predict.model"
    return getattr(import_module(f"certvol.{home}"), name)
