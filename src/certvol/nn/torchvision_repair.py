"""Import timm even if torchvision alone cannot be imported.

torchvision's build from PyPI, beside a CPU-only torch, fails with `operator torchvision::nms does
not exist`, and timm fails with it: its compiled operators do not load, but it registers Python code
for two of them. Declaring those two lets the import pass. torchvision's JPEG decoder and NMS stay
broken and are not used here.
"""

import importlib
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch


def import_timm() -> ModuleType:
    """Import timm; repair torchvision only if its import fails because operators are missing."""
    with warnings.catch_warnings():
        # About torchvision's image extension and timm's moved modules: users cannot act on these.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("timm")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
        # Remove half-imported modules, which would count as imported.
        for name in [name for name in sys.modules if name.split(".")[0] in ("torchvision", "timm")]:
            del sys.modules[name]
        _declared_operators()
        return importlib.import_module("timm")


@cache
def _declared_operators() -> Any:
    """Declare the missing operators; the cache keeps the library, and so its declarations."""
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
