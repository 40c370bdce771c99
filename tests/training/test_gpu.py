"""Whole runs on a GPU, where steps are recorded, fused and in mixed precision."""

import json
import math
from pathlib import Path

import pytest
import torch

import certvol
from certvol.errors import Interrupted
from certvol.methods import discover
from support.images import tiny
from support.stop_at import StopAt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("method", discover())
@pytest.mark.parametrize("norm", ["mixed", "per_domain"])
def test_every_method_trains_and_resumes(
    method: str, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(
        method__name=method, model__norm=norm, training__device="cuda", training__cycle_steps=8
    )
    kind = discover()[method]
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    stop = StopAt(18 if kind.adapts and not kind.closed_form else 10)
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "parts", stop_signal=stop, **settings)
    parts = certvol.adapt(resume=tmp_path / "parts")
    for run in (whole, parts):
        lines = [json.loads(line) for line in (run.path / "history.jsonl").read_text().splitlines()]
        assert all(math.isfinite(line["loss"]) for line in lines)
    assert whole.metrics is not None
    assert parts.metrics is not None
    assert parts.metrics["adapted"]["accuracy"] == pytest.approx(
        whole.metrics["adapted"]["accuracy"], abs=0.15
    )
