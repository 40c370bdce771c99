"""Warnings outlive the terminal: they are written beside the run from the moment there is one."""

import json
from pathlib import Path

import pytest

from certvol import api
from certvol.kept_warnings import KeptWarnings
from certvol.reporting import Silent
from certvol.training.run_folder import RunFolder
from images import tiny, write_domain


class Listening(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []

    def warn(self, text: str) -> None:
        self.told.append(text)


def _kept(run: Path) -> list[str]:
    return [json.loads(line)["warning"] for line in (run / "warnings.jsonl").read_text().splitlines()]


def test_a_warning_waits_for_the_run_to_exist(tmp_path: Path) -> None:
    heard = Listening()
    reporter = KeptWarnings(heard, RunFolder(tmp_path))
    reporter.warn("early")
    assert heard.told == ["early"]
    assert not (tmp_path / "warnings.jsonl").exists()
    (tmp_path / "config.yaml").touch()
    reporter.warn("late")
    assert _kept(tmp_path) == ["early", "late"]
    reporter.flush()
    assert _kept(tmp_path) == ["early", "late"]


def test_a_process_that_leaves_writing_to_another_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    KeptWarnings(Silent(), RunFolder(tmp_path, writes=False)).warn("mine")
    assert not (tmp_path / "warnings.jsonl").exists()


def test_a_warning_that_cannot_be_kept_is_still_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("certvol.kept_warnings.append_line", full)
    heard = Listening()
    KeptWarnings(heard, RunFolder(tmp_path)).warn("mind")
    assert heard.told == ["mind"]


def test_a_run_keeps_what_it_warned_of(tmp_path: Path) -> None:
    source = write_domain(tmp_path / "source")
    target = write_domain(tmp_path / "target", shift=20, seed=1)
    (target / "broken.png").write_bytes(b"no image")
    api.adapt(source, target, tmp_path / "run", **tiny())
    assert any("1 unreadable target images were skipped" in text for text in _kept(tmp_path / "run"))
