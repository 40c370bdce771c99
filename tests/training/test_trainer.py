"""Whole runs on tiny images: what they leave, and that it depends on nothing it should not depend on."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.errors import Interrupted, RunFailed, UserError
from certvol.methods import discover
from certvol.training.checkpoint import read_about
from ear import Ear
from images import HUES, tiny, write_domain
from stop_at import StopAt

METHODS = list(discover())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


def weights(run: Path, name: str = "model.safetensors") -> bytes:
    return (run / name).read_bytes()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_what_the_design_says(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = folders
    run = certvol.adapt(source, target, out=tmp_path / "run", **tiny())
    folder = run.path
    for name in (
        "config.yaml environment.json history.jsonl timing.jsonl pretrained.safetensors model.safetensors predictions.csv "
        "metrics.json checkpoint/latest.json cycles/scores.jsonl measures.csv evaluation.json features.safetensors"
    ).split():
        assert (folder / name).exists(), name
    history = lines(folder / "history.jsonl")
    assert [line["step"] for line in history if line["phase"] == "pretrain"] == [2, 4, 6, 8, 10, 12]
    adapt = [line for line in history if line["phase"] == "adapt"]
    assert [(line["cycle"], line["step"]) for line in adapt] == [(1, 2), (1, 4), (2, 6), (2, 8), (3, 10), (3, 12)]
    for key in ("lr", "loss", "ce", "samples_ce", "antagonistic", "sigma_source", "sigma_target"):
        assert isinstance(adapt[0][key], float), key
    assert not any("time" in key or "second" in key for line in history for key in line)
    assert [line["cycle"] for line in lines(folder / "cycles" / "scores.jsonl")] == [0, 1, 2, 3]
    assert load_file(folder / "cycles" / "0003.safetensors")["probabilities"].shape == (36, 3)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["device"]["type"] == "cpu"


def test_predictions_and_metrics_agree(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    with (run.path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == sorted(f"{name}/{i}.png" for name in HUES for i in range(12))
    assert all(0 < float(row["probability"]) <= 1 and float(row["sigma"]) > 0 for row in rows)
    right = np.mean([row["label"] == row["path"].split("/")[0] for row in rows])
    metrics = json.loads((run.path / "metrics.json").read_text())
    assert metrics["adapted"]["accuracy"] == pytest.approx(right)
    assert set(metrics["adapted"]["per_class"]) == set(HUES)
    assert metrics["delivered"]["model"] == "last"
    assert run.metrics == metrics


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(method__name=method)
    first, second, other = (
        certvol.adapt(*folders, out=tmp_path / name, **{**settings, "training.seed": seed}).path
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    for file in ("model.safetensors", "pretrained.safetensors", "predictions.csv", "history.jsonl"):
        assert weights(first, file) == weights(second, file), file
    assert weights(first) != weights(other)


def test_flat_class_and_shuffled_folders_give_the_same_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = folders
    files = sorted(target.rglob("*.png"))
    rng = np.random.default_rng(0)
    layouts = {"flat": tmp_path / "flat", "shuffled": tmp_path / "shuffled", "renamed": tmp_path / "renamed"}
    for folder in layouts.values():
        folder.mkdir()
    for number, file in enumerate(files):
        shutil.copy(file, layouts["flat"] / f"{file.parent.name}-{file.name}")
        shuffled = layouts["shuffled"] / str(rng.choice(list(HUES)))
        shuffled.mkdir(exist_ok=True)
        shutil.copy(file, shuffled / f"{number}.png")
        shutil.copy(file, layouts["renamed"] / f"{rng.integers(10**9)}.png")
    expected = certvol.adapt(source, target, out=tmp_path / "classes-run", **tiny()).path
    for name, folder in layouts.items():
        run = certvol.adapt(source, folder, out=tmp_path / f"{name}-run", **tiny()).path
        for file in ("model.safetensors", "pretrained.safetensors", "history.jsonl"):
            assert weights(run, file) == weights(expected, file), (name, file)
        assert (run / "metrics.json").exists() == (name == "shuffled")


def _interrupted_run(folders: tuple[Path, Path], out: Path, settings: dict[str, object], steps: list[int]) -> Path:
    for number, step in enumerate(steps):
        begin = {"source": folders[0], "target": folders[1], "out": out, **settings} if number == 0 else {"resume": out}
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
    steps = [1, 5, 6, 1, 3, 4, 2] if in_cycles else [1, 5, 6]
    parts = _interrupted_run(folders, tmp_path / "parts", settings, steps)
    for file in ("model.safetensors", "pretrained.safetensors", "predictions.csv", "history.jsonl", "metrics.json"):
        assert weights(parts, file) == weights(whole, file), file
    if discover()[method].adapts:
        assert weights(parts, "cycles/scores.jsonl") == weights(whole, "cycles/scores.jsonl")


@pytest.mark.parametrize("steps", [[14, 3, 2], [13, 5, 6, 1, 3]])
def test_a_trial_of_modes_stopped_anywhere_ends_with_the_same_bytes(
    folders: tuple[Path, Path], tmp_path: Path, steps: list[int]
) -> None:
    settings = tiny(model__norm="auto", training__cycles=4, guard__trial_cycles=2)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = _interrupted_run(folders, tmp_path / "parts", settings, steps)
    for file in ("model.safetensors", "predictions.csv", "history.jsonl", "metrics.json", "cycles/scores.jsonl"):
        assert weights(parts, file) == weights(whole, file), file


def test_a_chosen_trial_is_the_run_of_that_mode(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The trial's cycles are not lost: weights and history are those of a run that was told the mode."""
    tried = certvol.adapt(*folders, out=tmp_path / "auto", **tiny(model__norm="auto", guard__trial_cycles=1)).path
    mode = read_about(tried / "model.safetensors")["norm"]
    told = certvol.adapt(*folders, out=tmp_path / "told", **tiny(model__norm=mode)).path
    for name in ("history.jsonl", "predictions.csv", "cycles/scores.jsonl"):
        assert weights(tried, name) == weights(told, name), name
    first, second = load_file(tried / "model.safetensors"), load_file(told / "model.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in second)


def test_training_does_not_read_target_labels(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While training lasts, the function that turns folders into labels raises."""
    from certvol import evaluation
    from certvol.training.trainer import Trainer

    fit, labels = Trainer.fit, evaluation.folder_labels
    training = False

    def watched_fit(self: Trainer) -> object:
        nonlocal training
        training = True
        try:
            return fit(self)
        finally:
            training = False

    def watched_labels(*arguments: object) -> object:
        assert not training
        return labels(*arguments)

    monkeypatch.setattr(Trainer, "fit", watched_fit)
    monkeypatch.setattr(evaluation, "folder_labels", watched_labels)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    assert run.metrics is not None


@pytest.mark.parametrize("norm", ["mixed", "per_domain", "dsbn", "frozen", "auto"])
@pytest.mark.parametrize("train", ["all", "last_block", "head"])
def test_every_normalisation_with_every_trained_part(
    norm: str, train: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(
        *folders, out=tmp_path / "run", **tiny(model__norm=norm, model__train=train, training__cycles=2)
    )
    before, after = load_file(run.path / "pretrained.safetensors"), load_file(run.path / "model.safetensors")
    first_convolution = "network.backbone.stages.0.0.weight"
    assert torch.equal(before[first_convolution], after[first_convolution]) == (train != "all")
    assert not torch.equal(before["network.classifier.output.weight"], after["network.classifier.output.weight"])


def test_pseudo_labels_by_mc_dropout_on_an_augmented_view(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(
        training__pseudo_labels="mc_dropout", training__label_view="augmented", training__fresh_optimizer=True
    )
    first, second = (certvol.adapt(*folders, out=tmp_path / name, **settings).path for name in "ab")
    assert weights(first) == weights(second)


def test_labelling_everything_is_a_setting(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__labelling="full"))
    labelled = [line["labelled"] for line in lines(run.path / "timing.jsonl") if "labelled" in line]
    assert labelled == [36, 36, 36]


def test_a_method_can_ask_for_labels_of_the_whole_target(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "labels_whole_target", True)
    monkeypatch.setattr("certvol.acceleration.CPU_EVALUATION_BATCH", 6)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__batch_size=8))
    assert [line["labelled"] for line in lines(run.path / "timing.jsonl") if "labelled" in line] == [36, 36, 36]


def test_labelling_on_demand_ends_early_and_a_cap_ends_it_earlier(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("certvol.acceleration.CPU_EVALUATION_BATCH", 6)
    settings = tiny(training__cycle_steps=1, training__pretrain_steps=60)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    labelled = [line["labelled"] for line in lines(run.path / "timing.jsonl") if "labelled" in line]
    assert all(count < 36 for count in labelled)
    capped = certvol.adapt(*folders, out=tmp_path / "capped", **{**settings, "training.labelling_share": 0.1})
    assert [line["labelled"] for line in lines(capped.path / "timing.jsonl") if "labelled" in line] == [4, 4, 4]


def test_a_learning_rate_out_of_reach_stops_the_run_and_keeps_a_good_state(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(training__learning_rate=1e6, training__pretrain_steps=60)
    with pytest.raises(RunFailed, match=r"training\.learning_rate"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["source_only", "cvp"])
def test_weights_ruined_by_the_last_step_are_not_delivered_nor_kept(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The loss is taken before the step, so it alone would not tell."""
    settings = tiny(method__name=method, training__learning_rate=1e30, training__pretrain_steps=1)
    with pytest.raises(RunFailed, match="no longer finite"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_the_last_good_state_is_finite(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.training import trainer as module

    monkeypatch.setattr(module, "pretraining_rate", lambda settings: monkeypatch_rates.pop(0))
    monkeypatch_rates = [0.01] * 20 + [1e30] * 40
    settings = tiny(training__pretrain_steps=60, training__checkpoint_seconds=0)
    with pytest.raises(RunFailed, match="The last good state is in"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    states = list((tmp_path / "run" / "checkpoint").glob("state-*.safetensors"))
    assert states
    assert all(value.isfinite().all() for state in states for value in load_file(state).values())


def test_a_dead_sigma_is_said(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "sigma", lambda self, features: features.sum(1) * 0)
    ear = Ear()
    certvol.adapt(*folders, out=tmp_path / "run", reporter=ear, **tiny())
    assert [text for text in ear.warned if "sigma of the source has collapsed" in text]


def test_an_exploding_sigma_is_said(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "sigma", lambda self, features: features.sum(1) * 0 + 50)
    ear = Ear()
    certvol.adapt(*folders, out=tmp_path / "run", reporter=ear, **tiny())
    assert [text for text in ear.warned if "sigma of the source has grown to 50.0" in text]


def _collapsing(monkeypatch: pytest.MonkeyPatch, after_cycle: int) -> None:
    """From that cycle on, labels all fall onto one class, and training on them is made to show at once."""
    from certvol.training import trainer as module

    honest = module.label_free_scores

    def scores(probabilities: np.ndarray, pretrained: np.ndarray, source: float | None) -> dict[str, float | None]:
        found = honest(probabilities, pretrained, source)
        scores.calls += 1
        return {**found, "classes_in_use": 1.0} if scores.calls > after_cycle + 1 else found

    scores.calls = 0
    monkeypatch.setattr(module, "label_free_scores", scores)


def test_a_collapse_goes_back_to_the_best_healthy_cycle_and_says_so(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=2)
    ear = Ear()
    run = certvol.adapt(*folders, out=tmp_path / "run", reporter=ear, **tiny(training__cycles=8))
    assert run.delivery.model in ("cycle 1", "cycle 2")
    assert "collapsed at cycle 4" in run.delivery.why
    assert any("classes" in text for text in ear.warned)
    kept = load_file(run.path / "cycles" / "best-mutual_information.safetensors")
    assert all(torch.equal(kept[key], value) for key, value in load_file(run.path / "model.safetensors").items())


def test_a_collapse_in_the_last_cycle_needs_no_patience(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=2)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=3))
    assert run.delivery.model in ("cycle 1", "cycle 2")
    assert "collapsed at cycle 3" in run.delivery.why


@pytest.mark.parametrize("method", ["cvp", "coral"])
def test_a_collapse_in_the_only_cycle_is_not_delivered(
    method: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    settings = tiny(method__name=method, training__cycles=1, training__pretrain_steps=40)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert run.delivery.model == "pretrained"


def test_a_collapse_in_the_only_cycle_can_fail_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    with pytest.raises(RunFailed, match="collapsed at cycle 1"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=1, guard__action="stop"))


def test_a_collapse_from_the_start_delivers_the_pretrained_model(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=8))
    assert run.delivery.model == "pretrained"
    assert run.metrics is not None
    assert run.metrics["adapted"] == run.metrics["source_only"]


def test_the_guard_can_fail_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    with pytest.raises(RunFailed, match=r"collapsed at cycle 2.*pretrained model is kept"):
        certvol.adapt(*folders, out=tmp_path / "stop", **tiny(guard__action="stop"))
    with pytest.raises(RunFailed, match="collapsed at cycle 2"):
        certvol.adapt(resume=tmp_path / "stop")


def test_the_guard_can_fail_the_run_where_every_trial_collapsed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(model__norm="auto", guard__action="stop", guard__patience=1, guard__spread=1.5)
    with pytest.raises(RunFailed, match="collapsed at cycle 1"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)


@pytest.mark.parametrize("images", [1, 2, 17])
@pytest.mark.parametrize("norm", ["per_domain", "auto"])
def test_a_target_of_few_images(images: int, norm: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    for number, file in enumerate(sorted(folders[1].rglob("*.png"))[:images]):
        shutil.copy(file, tmp_path / "target" / f"{number}.png")
    run = certvol.adapt(
        folders[0], tmp_path / "target", out=tmp_path / "run", **tiny(model__norm=norm, training__batch_size=16)
    )
    assert (run.path / "predictions.csv").read_text().count("\n") == images + 1


def test_a_target_that_lacks_classes_is_warned_of(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """One class alone: class-balanced batches force predictions apart, and the user must hear of it."""
    shutil.copytree(folders[1] / "sky", tmp_path / "target" / "sky")
    ear = Ear()
    run = certvol.adapt(
        folders[0],
        tmp_path / "target",
        out=tmp_path / "run",
        reporter=ear,
        **tiny(training__pretrain_steps=60, training__cycles=20),
    )
    assert run.metrics is not None
    harmed = run.metrics["adapted"]["accuracy"] < run.metrics["source_only"]["accuracy"] - 0.25
    assert any("lacks classes" in text for text in ear.warned) or not harmed


def _left_of_trials(run: Path) -> list[str]:
    states = [path for path in (run / "checkpoint").iterdir() if path.is_dir()]
    return sorted(path.name for path in (*states, *(run / "cycles").glob("trial-*/best-*")))


def test_trial_states_and_weights_are_removed_once_a_mode_is_chosen(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(model__norm="auto"))
    assert _left_of_trials(run.path) == []
    assert list((run.path / "cycles").glob("best-*"))


def test_killed_before_a_trials_files_are_removed_a_run_removes_them_later(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.training.trainer import Trainer

    class Killed(BaseException):
        pass

    settings = tiny(model__norm="auto", guard__select="mutual_information")
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    for number in (0, 1):  # before the second checkpoint that needs no trials, and after it
        with monkeypatch.context() as patch:
            saves = 0

            def saving(
                trainer: Trainer, honest: Callable[[Trainer], None] = Trainer._save, number: int = number
            ) -> None:
                nonlocal saves
                honest(trainer)
                saves += trainer.position.phase == "adapt"
                if saves > number:
                    raise Killed

            patch.setattr(Trainer, "_save", saving)
            with pytest.raises(Killed):
                certvol.adapt(*folders, out=tmp_path / str(number), **settings)
        parts = tmp_path / str(number)
        assert len(_left_of_trials(parts)) > 3
        certvol.adapt(resume=parts)
        assert _left_of_trials(parts) == []
        for file in ("model.safetensors", "history.jsonl", "cycles/scores.jsonl", "predictions.csv"):
            assert weights(parts, file) == weights(whole, file), file


def test_the_guard_can_only_warn(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    ear = Ear()
    run = certvol.adapt(*folders, out=tmp_path / "warn", reporter=ear, **tiny(guard__action="warn"))
    assert run.delivery.model == "last"
    assert ear.warned


def test_an_out_folder_with_another_run_or_other_files_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=1))
    before = weights(tmp_path / "run")
    with pytest.raises(UserError, match="holds another run"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    assert weights(tmp_path / "run") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not empty.*thesis\.tex"):
        certvol.adapt(*folders, out=tmp_path / "full", **tiny())


def test_resuming_a_complete_run_changes_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=1))
    before = weights(run.path)
    again = certvol.adapt(resume=run.path)
    assert weights(run.path) == before
    assert again.metrics == run.metrics
    assert again.delivery == run.delivery


def test_changed_images_are_noticed_when_resuming(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders[1], target)
    with pytest.raises(Interrupted):
        certvol.adapt(folders[0], target, out=tmp_path / "run", stop_signal=StopAt(3), **tiny())
    next(target.rglob("*.png")).unlink()
    with pytest.raises(UserError, match="target images have changed"):
        certvol.adapt(resume=tmp_path / "run")


def test_two_processes_cannot_write_one_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from certvol.training.run_folder import RunFolder

    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "run", stop_signal=StopAt(3), **tiny())
    with RunFolder(tmp_path / "run").lock(), pytest.raises(UserError, match="another process"):
        certvol.adapt(resume=tmp_path / "run")


def test_config_yaml_repeats_the_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first = certvol.adapt(*folders, out=tmp_path / "a", **tiny()).path
    second = certvol.adapt(out=tmp_path / "b", config=first / "config.yaml").path
    assert weights(first) == weights(second)
