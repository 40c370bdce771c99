"""Stopping, resuming and saving: an interrupted run ends with the same bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.errors import Interrupted, RunFailed, UserError
from certvol.methods import discover
from certvol.training.keeper import RunKeeper
from certvol.training.state import RunState
from certvol.training.step import Stepper
from support.images import tiny
from support.run_folders import weights
from support.stop_at import StopAt

# One for each kind of state; a slow test in test_trainer.py stops runs of all methods.
METHODS = ("cvp", "basic", "can", "self_ensembling", "rsda_mstn", "coral", "source_only")


def _interrupted_run(
    folders: tuple[Path, Path], out: Path, settings: dict[str, Any], steps: list[int]
) -> Path:
    for number, step in enumerate(steps):
        begin = (
            {"source": folders[0], "target": folders[1], "out": out, **settings}
            if number == 0
            else {"resume": out}
        )
        with pytest.raises(Interrupted, match="--resume") as caught:
            certvol.adapt(stop_signal=StopAt(step), **begin)
        assert caught.value.exit_code == 143
    return certvol.adapt(resume=out).path


@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_anywhere_ends_with_the_same_bytes(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(method__name=method)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    in_cycles = discover()[method].adapts and not discover()[method].closed_form
    # Within pretraining and at its end, within a cycle and at its end.
    steps = [5, 7, 1, 3, 6] if method == "cvp" else [5, 7, 3, 5] if in_cycles else [5, 7]
    parts = _interrupted_run(folders, tmp_path / "parts", settings, steps)
    for file in (
        "model.safetensors",
        "pretrained.safetensors",
        "predictions.csv",
        "history.jsonl",
        "metrics.json",
    ):
        assert weights(parts, file) == weights(whole, file), file
    if discover()[method].adapts:
        assert weights(parts, "cycles/scores.jsonl") == weights(whole, "cycles/scores.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cvp", "dann"])
def test_a_run_with_adamw_stopped_anywhere_ends_with_the_same_bytes(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A discriminator counts its steps from the start of adaptation."""
    settings = tiny(method__name=method, training__optimizer="adamw", training__weight_decay=0.1)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = _interrupted_run(folders, tmp_path / "parts", settings, [5, 8, 3, 4])
    for file in ("model.safetensors", "history.jsonl"):
        assert weights(parts, file) == weights(whole, file), file
    sgd = {**settings, "training.optimizer": "sgd"}
    assert weights(certvol.adapt(*folders, out=tmp_path / "sgd", **sgd).path) != weights(whole)


def _left_of_trials(run: Path) -> list[str]:
    states = [path for path in (run / "checkpoint").iterdir() if path.is_dir()]
    return sorted(path.name for path in (*states, *(run / "cycles").glob("trial-*/best-*")))


def test_states_and_weights_of_trials_are_removed_once_a_mode_is_chosen(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(model__norm="auto"))
    assert _left_of_trials(run.path) == []
    assert list((run.path / "cycles").glob("best-*"))


def test_a_run_killed_before_it_removes_files_of_trials_removes_them_when_resumed(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    settings = tiny(model__norm="auto", guard__select="mutual_information")
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    for number in (0, 1):  # before the second checkpoint that needs no trials, and after it
        with monkeypatch.context() as patch:
            saves = 0

            def saving(
                keeper: RunKeeper,
                state: RunState,
                honest: Callable[[RunKeeper, RunState], None] = RunKeeper.save,
                number: int = number,
            ) -> None:
                nonlocal saves
                honest(keeper, state)
                saves += state.position.phase == "adapt"
                if saves > number:
                    raise Killed

            patch.setattr(RunKeeper, "save", saving)
            with pytest.raises(Killed):
                certvol.adapt(*folders, out=tmp_path / str(number), **settings)
        parts = tmp_path / str(number)
        assert len(_left_of_trials(parts)) > 3
        certvol.adapt(resume=parts)
        assert _left_of_trials(parts) == []
        for file in (
            "model.safetensors",
            "history.jsonl",
            "cycles/scores.jsonl",
            "predictions.csv",
        ):
            assert weights(parts, file) == weights(whole, file), file


def test_an_out_folder_with_another_run_or_other_files_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=1))
    before = weights(tmp_path / "run")
    with pytest.raises(UserError, match="holds another run"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    assert weights(tmp_path / "run") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not empty.*thesis\.tex"):
        certvol.adapt(*folders, out=tmp_path / "full", **tiny())


def test_resuming_a_complete_run_changes_nothing(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=1))
    before = weights(run.path)
    again = certvol.adapt(resume=run.path)
    assert weights(run.path) == before
    assert again.metrics == run.metrics
    assert again.delivery == run.delivery


def test_changed_images_are_noticed_when_resuming(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders[1], target)
    with pytest.raises(Interrupted):
        certvol.adapt(folders[0], target, out=tmp_path / "run", stop_signal=StopAt(3), **tiny())
    next(target.rglob("*.png")).unlink()
    with pytest.raises(UserError, match="target images changed"):
        certvol.adapt(resume=tmp_path / "run")


def test_two_processes_cannot_write_one_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from certvol.runs.folder import RunFolder

    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "run", stop_signal=StopAt(3), **tiny())
    with RunFolder(tmp_path / "run").lock(), pytest.raises(UserError, match="another process"):
        certvol.adapt(resume=tmp_path / "run")


def test_the_last_good_state_is_finite(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step: Any = Stepper.step

    def exploding(self: Stepper, plan: Any, index: int, place: int, *rest: Any) -> Any:
        rate = 0.01 if place < 20 else 1e30
        return step(self, plan, index, place, *rest[:-1], rate)

    monkeypatch.setattr(Stepper, "step", exploding)
    settings = tiny(training__pretrain_steps=60, training__checkpoint_seconds=0)
    with pytest.raises(RunFailed, match="the last good state is in"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    states = list((tmp_path / "run" / "checkpoint").glob("state-*.safetensors"))
    assert states
    assert all(value.isfinite().all() for state in states for value in load_file(state).values())


def test_labels_of_other_images_in_a_checkpoint_are_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A run folder may come from anywhere."""
    from certvol.errors import RunFailed
    from certvol.runs.checkpoint import Checkpoints, State

    with pytest.raises(Interrupted):
        certvol.adapt(
            *folders, out=tmp_path / "run", stop_signal=StopAt(15), **tiny(method__name="ubr2s")
        )
    kept = Checkpoints(tmp_path / "run" / "checkpoint")
    state, _ = kept.load()
    assert state is not None
    for name, broken in (("labelled", torch.full((36,), 7)), ("tables.mean", torch.zeros(5, 3))):
        kept.save(State({**state.tensors, name: broken}, state.facts))
        kept.save(State({**state.tensors, name: broken}, state.facts))
        with pytest.raises(RunFailed, match="not one of this run"):
            certvol.adapt(resume=tmp_path / "run")
