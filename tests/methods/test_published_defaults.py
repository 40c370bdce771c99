"""Defaults that are published values, or that a method's head declares as ours."""

from typing import Any

import pytest

from certvol.methods import discover

DEFAULTS: dict[str, dict[str, Any]] = {
    "rwa": {"steps": 100, "target_share": 0.5},
    "adrem": {"rounds": 20, "repetitions": 11},
    "prda": {"dims": 44, "subspaces": 3, "confidence": 0.9},
    "adr": {"generator_steps": 4},
    "mdd": {"margin": 4.0, "reversal": 0.1},
    "shot": {"pseudo_weight": 0.3, "min_images": 10, "label_smoothing": 0.1},
    "aad": {"neighbours": 3, "decay": 1.0},
    "atdoc": {"weight": 0.2, "neighbours": 5},
    "renyi": {"portion": 0.3, "portion_growth": 0.05, "most_portion": 0.6},
    "sdat": {"radius": 0.02},
    "mic": {"masked": 0.7, "teacher_decay": 0.9},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_published_ones(name: str) -> None:
    config = discover()[name].Config()
    assert {field: getattr(config, field) for field in DEFAULTS[name]} == DEFAULTS[name]
