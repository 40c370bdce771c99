"""Imports timm where torchvision alone cannot be imported.

torchvision's build from PyPI, beside a CPU-only torch, fails with `operator torchvision::nms does not exist`, and timm fails
with it: its compiled operators did not load, and it registers Python code for two of them all the same. Declaring those two
lets the import pass. What stays broken, torchvision's JPEG decoder and NMS, is not used here.
"""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

# Kept for ever: a Library takes its declarations with it when it is collected.
_declared: list[Any] = []


def import_timm() -> ModuleType:
    """The timm module, torchvision having been repaired if, and only if, its import failed for lack of operators."""
    with warnings.catch_warnings():
        # About torchvision's image extension and timm's own moved modules: nothing that a user could act on.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("timm")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
        _forget("torchvision", "timm")
        _declare_operators()
        return importlib.import_module("timm")


def _declare_operators() -> None:
    if _declared:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        library.define(schema)
    _declared.append(library)


def _forget(*packages: str) -> None:
    """Half-imported modules would be taken for whole ones at the next import."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]
