"""Adaptation ends when labels stop changing, and one survey serves both labels and guard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import certvol
from certvol.data.views import ImageViews
from certvol.errors import Interrupted
from certvol.methods import discover
from certvol.nn.norm import TARGET
from certvol.training import cycle_labels
from certvol.training.model_choice import Watch
from certvol.training.state import RunState
from support.images import tiny
from support.reporter import RecordingReporter
from support.run_folders import weights
from support.stop_at import StopAt

WHOLE_TARGET = "can"  # labels all target images before every cycle


def scores_of(run: Path) -> list[dict[str, Any]]:
    text = (run / "cycles" / "scores.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def labels_of(run: Path, cycle: int) -> Any:
    return load_file(run / "cycles" / f"{cycle:04d}.safetensors")["probabilities"].argmax(1).numpy()


@pytest.mark.parametrize(("most", "ended"), [(0.0, None), (0.2, 4), (0.05, None), (0.3, 3)])
def test_two_quiet_cycles_in_a_row_are_counted(most: float, ended: int | None) -> None:
    state = RunState.__new__(RunState)
    state.position = certvol.training.state.Position()
    settled = []
    for cycle, changed in enumerate((0.5, 0.3, 0.2, 0.2, 0.1), start=1):
        state.note_change(changed, most)
        settled += [cycle] if state.position.settled is not None else []
    assert (settled[0] if settled else None) == ended


@pytest.mark.parametrize("method", ["cvp", WHOLE_TARGET])
def test_adaptation_ends_when_labels_settle_and_says_so(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(
        method__name=method,
        training__settled=0.1,
        training__cycles=30,
        training__pretrain_steps=60,
        training__learning_rate=1e-4,
    )
    reporter = RecordingReporter()
    run = certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **settings)
    last = scores_of(run.path)[-1]["cycle"]
    assert 2 <= last < 30
    assert run.delivery.model == "last"
    assert run.delivery.why == f"cycle {last}, labels settled"
    (sentence,) = [text for text in reporter.said if text.startswith("adaptation settled")]
    assert sentence.startswith(f"adaptation settled at cycle {last}: ")
    assert sentence.endswith(" % of pseudo-labels changed")
    if method == "cvp":
        before, after = (labels_of(run.path, cycle) for cycle in (last - 1, last))
        assert f" {100 * (before != after).mean():.1f} %" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "norm"), [("cvp", "per_domain"), (WHOLE_TARGET, "per_domain"), ("cvp", "auto")]
)
def test_a_run_that_settles_ends_with_the_same_bytes_when_stopped(
    method: str, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(
        method__name=method,
        model__norm=norm,
        guard__trial_cycles=2,
        training__settled=0.1,
        training__cycles=8,
        training__pretrain_steps=12,
        training__learning_rate=1e-3,
    )
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = tmp_path / "parts"
    begin: dict[str, Any] = {"source": folders[0], "target": folders[1], "out": parts, **settings}
    for asked in (14, 7, 9, 6):
        try:
            certvol.adapt(stop_signal=StopAt(asked), **begin)
        except Interrupted:
            begin = {"resume": parts}
        else:
            break
    certvol.adapt(resume=parts)
    for file in ("model.safetensors", "history.jsonl", "metrics.json", "cycles/scores.jsonl"):
        assert weights(parts, file) == weights(whole, file), file


@pytest.mark.parametrize("method", ["dann", "rsda_dann"])
def test_stages_and_growing_losses_are_not_cut_short(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(method__name=method, training__settled=1.0, training__cycles=3)
    stages = 1
    if method == "rsda_dann":
        settings["method.rounds"], stages = 1, 2
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert scores_of(run.path)[-1]["cycle"] == 3 * stages
    assert "settled" not in run.delivery.why


def test_trials_of_norm_modes_run_to_their_end(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(
        model__norm="auto", training__settled=1.0, training__cycles=8, guard__trial_cycles=4
    )
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    for mode in ("mixed", "per_domain"):
        lines = (run.path / "cycles" / f"trial-{mode}" / "scores.jsonl").read_text().splitlines()
        assert len(lines) == 5  # with that of the pretrained model
    assert run.delivery.why == "cycle 5, labels settled"


@pytest.mark.parametrize("method", [m for m, found in discover().items() if found.adapts])
def test_methods_whose_losses_grow_say_so(method: str) -> None:
    """This reads their source: a reversed gradient that grows does not show in the loss."""
    import inspect

    found = discover()[method]
    texts = [inspect.getsource(inspect.getmodule(c)) for c in found.__mro__[:-3]]  # type: ignore[arg-type]
    assert (
        any("batch.progress" in text for text in texts if "class Batch:" not in text) == found.ramps
    )


def test_the_guard_looks_at_the_survey_that_the_next_labels_need(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target passes once per cycle, and the guard sees what its own pass would have shown."""
    passed, looked = 0, []
    test_view, surveyed = ImageViews.test_view, Watch.surveyed

    def counting(self: ImageViews, domain: int, images_N: Any) -> Any:
        nonlocal passed
        passed += len(images_N) if domain == TARGET else 0
        return test_view(self, domain, images_N)

    def compared(self: Watch, survey: Any) -> Any:
        found = surveyed(self, survey)
        nonlocal passed
        before, own = passed, self.target()
        passed = before
        assert np.allclose(found.probabilities_NC, own.probabilities_NC, atol=1e-6)
        assert (found.sigma_N is None) == (own.sigma_N is None)
        if found.sigma_N is not None and own.sigma_N is not None:
            assert np.allclose(found.sigma_N, own.sigma_N, rtol=1e-5)
        looked.append(passed)
        return found

    monkeypatch.setattr(ImageViews, "test_view", counting)
    monkeypatch.setattr(Watch, "surveyed", compared)
    settings = tiny(training__pseudo_labels="cluster", training__cycles=4)
    certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert len(looked) == 3  # after the last cycle no labels are needed
    assert np.diff(looked).tolist() == [36, 36]


def test_clusters_that_rest_do_not_end_a_run_whose_predictions_still_change(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After each cycle its predictions, then the labels of the next one: these never change.
    shares = iter([0.3, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(cycle_labels, "_share_changed", lambda before, now: next(shares))
    settings = tiny(training__pseudo_labels="cluster", training__cycles=9, training__settled=0.01)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert run.delivery.why == "cycle 4, labels settled"
