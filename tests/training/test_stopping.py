"""A run can be stopped inside long pieces of work, and says how to resume."""

from pathlib import Path

import pytest

import certvol
from certvol import api
from certvol.errors import Interrupted
from support.images import tiny
from support.stop_at import StopAt

Domains = tuple[Path, Path]


@pytest.mark.parametrize("step", [14, 15])  # in the features of the source, and of the target
def test_a_method_in_closed_form_stops_while_it_computes_features(
    step: int, folders: Domains, tmp_path: Path
) -> None:
    settings = tiny(method__name="coral")
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "parts", stop_signal=StopAt(step), **settings)
    assert not (tmp_path / "parts" / "predictions.csv").exists()
    parts = certvol.adapt(resume=tmp_path / "parts")
    for name in ("model.safetensors", "history.jsonl", "predictions.csv"):
        assert (parts.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_stop_after_training_says_how_to_resume(
    folders: Domains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        raise Interrupted("stopped", 143)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(api, "run_target", stopped)
        with pytest.raises(Interrupted, match=f"certvol adapt --resume {run}") as caught:
            certvol.adapt(*folders, out=run, **tiny())
    assert caught.value.exit_code == 143
    assert certvol.adapt(resume=run).delivery.model == "last"
