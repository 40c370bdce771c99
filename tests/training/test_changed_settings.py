"""A run that is resumed keeps the settings that it began with."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import certvol
from certvol.errors import Interrupted, UserError
from certvol.runs.environment import target_fingerprint
from certvol.runs.folder import RunFolder
from certvol.training import setup
from support.images import tiny, write_domain
from support.reporter import RecordingReporter
from support.stop_at import StopAt

Domains = tuple[Path, Path]


def stopped(folders: Domains, run: Path, **changed: object) -> Path:
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=run, stop_signal=StopAt(15), **tiny(**changed))
    return run


def edit(run: Path, section: str, **values: object) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings[section].update(values)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("training", "seed", 7),
        ("training", "learning_rate", 0.02),
        ("data", "holdout", 0.3),
        ("training", "batch_size", 12),
        ("training", "precision", "bf16"),
        ("training", "cycles", 2),
        ("method", "num_samples", 8),
        ("guard", "select", "entropy"),
    ],
)
def test_a_changed_setting_is_named_and_refused(
    section: str, name: str, value: object, folders: Domains, tmp_path: Path
) -> None:
    run = stopped(folders, tmp_path / "run")
    edit(run, section, **{name: value})
    with pytest.raises(UserError, match=rf"`{section}\.{name}` .* -> .*--accept-changes"):
        certvol.adapt(resume=run)
    assert not (run / "model.safetensors").exists()


def test_changed_settings_are_used_if_the_user_says_so(folders: Domains, tmp_path: Path) -> None:
    run = stopped(folders, tmp_path / "run")
    edit(run, "training", cycles=2)
    assert certvol.adapt(resume=run, accept_changes=True).delivery.why.startswith("cycle 2")


def test_settings_that_change_no_result_may_change(folders: Domains, tmp_path: Path) -> None:
    run = stopped(folders, tmp_path / "run")
    edit(run, "training", checkpoint_seconds=5.0, tensorboard=False, log_every=1)
    certvol.adapt(resume=run)


def test_accepting_changes_needs_a_run(folders: Domains, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--accept-changes is for --resume"):
        certvol.adapt(*folders, out=tmp_path / "run", accept_changes=True, **tiny())


def test_a_renamed_class_folder_is_noticed(tmp_path: Path) -> None:
    domains = (write_domain(tmp_path / "s"), write_domain(tmp_path / "t", seed=1))
    run = stopped(domains, tmp_path / "run")
    (tmp_path / "s" / "apple").rename(tmp_path / "s" / "apples")
    with pytest.raises(UserError, match="apple -> apples"):
        certvol.adapt(resume=run)


def test_a_run_keeps_its_precision_on_another_machine(
    folders: Domains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_machine(has_bf16: bool) -> Callable[..., bool]:
        return lambda settings, network, device: (
            has_bf16 if settings.precision == "auto" else settings.precision == "bf16"
        )

    monkeypatch.setattr(setup, "uses_bf16", on_a_machine(False))
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **tiny())
    run = stopped(folders, tmp_path / "run")
    monkeypatch.setattr(setup, "uses_bf16", on_a_machine(True))
    reporter = RecordingReporter()
    certvol.adapt(resume=run, reporter=reporter)
    assert any("began in fp32 and keeps it" in text for text in reporter.warned)
    for name in ("model.safetensors", "history.jsonl", "predictions.csv"):
        assert (run / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.parametrize(
    ("section", "name", "value"), [("data", "image_size", 20), ("method", "num_samples", 8)]
)
def test_a_model_is_not_used_with_settings_that_were_edited_after_training(
    section: str, name: str, value: object, folders: Domains, tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny()).path
    edit(run, "training", cycles=30)  # a loaded model does not use it
    certvol.load(run)
    edit(run, section, **{name: value})
    refusal = rf"edited after training \(`{section}\.{name}` .* -> {value}\)"
    with pytest.raises(UserError, match=refusal):
        certvol.load(run)
    with pytest.raises(UserError, match=refusal):
        certvol.evaluate(run, folders[1], "cpu")


def test_a_run_knows_the_target_it_trained_on_if_that_changed_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    domains = (write_domain(tmp_path / "s"), write_domain(tmp_path / "t", seed=1))
    run = stopped(domains, tmp_path / "run")
    before = target_fingerprint(RunFolder(run))
    shutil.rmtree(run / "checkpoint")
    (tmp_path / "t" / "sky" / "0.png").unlink()
    certvol.adapt(resume=run)
    fresh = certvol.adapt(*domains, out=tmp_path / "fresh", **tiny()).path
    assert before != target_fingerprint(RunFolder(run)) == target_fingerprint(RunFolder(fresh))
