"""Labelled source images, unlabelled target images, a classifier for the target with a certainty per image.

`run = certvol.adapt(source, target, out=...)`, `model = certvol.load(run_folder)`, `model.predict(images)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from certvol.api import Run, adapt, evaluate
    from certvol.model import Model, Prediction, load

__all__ = ["Model", "Prediction", "Run", "adapt", "evaluate", "load"]
_HOME = {"Run": "api", "adapt": "api", "evaluate": "api", "Model": "model", "Prediction": "model", "load": "model"}


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]


def __getattr__(name: str) -> Any:
    """On first use: `import certvol` and `certvol --help` do without torch."""
    if name in _HOME:
        return getattr(import_module(f"certvol.{_HOME[name]}"), name)
    raise AttributeError(f"module 'certvol' has no attribute {name!r}")
