"""Warnings are written to the run folder once it exists."""

import json
from pathlib import Path

import pytest

from certvol import api
from certvol.progress import Silent
from certvol.runs.folder import RunFolder
from certvol.runs.kept_warnings import KeptWarnings
from support.images import tiny, write_domain
from support.reporter import RecordingReporter


def _kept(run: Path) -> list[str]:
    return [
        json.loads(line)["warning"] for line in (run / "warnings.jsonl").read_text().splitlines()
    ]


def test_a_warning_is_written_once_the_run_exists(tmp_path: Path) -> None:
    shown = RecordingReporter()
    reporter = KeptWarnings(shown, RunFolder(tmp_path))
    reporter.warn("early")
    assert shown.warned == ["early"]
    assert not (tmp_path / "warnings.jsonl").exists()
    (tmp_path / "config.yaml").touch()
    reporter.warn("late")
    assert _kept(tmp_path) == ["early", "late"]
    reporter.flush()
    assert _kept(tmp_path) == ["early", "late"]


def test_a_process_that_does_not_write_keeps_no_warnings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    KeptWarnings(Silent(), RunFolder(tmp_path, writes=False)).warn("mine")
    assert not (tmp_path / "warnings.jsonl").exists()


def test_a_warning_that_cannot_be_written_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("certvol.runs.kept_warnings.append_line", full)
    shown = RecordingReporter()
    KeptWarnings(shown, RunFolder(tmp_path)).warn("mind")
    assert shown.warned == ["mind"]


def test_a_run_keeps_its_warnings(tmp_path: Path) -> None:
    source = write_domain(tmp_path / "source")
    target = write_domain(tmp_path / "target", shift=20, seed=1)
    (target / "broken.png").write_bytes(b"no image")
    api.adapt(source, target, tmp_path / "run", **tiny())
    assert any(
        "1 unreadable target images were skipped" in text for text in _kept(tmp_path / "run")
    )
