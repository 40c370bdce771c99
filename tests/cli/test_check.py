"""`certvol check` prints what it found."""

import json
from pathlib import Path

import pytest

from certvol.cli._main import run
from certvol.cli.check import LISTED_FILES
from support.images import write_domain


def test_check_prints_counts(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", "--source", str(folders[0]), "--target", str(folders[1])]) == 0
    out = capsys.readouterr().out
    for name in ("apple", "leaf", "sky"):
        assert name in out
    assert "adaptation can start" in out


def test_check_lists_files_that_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_domain(tmp_path / "source")
    target = write_domain(tmp_path / "target", flat=True)
    for number in range(LISTED_FILES):
        (target / f"broken{number:02d}.jpg").write_bytes(b"no image")
    (target / "nothing.png").touch()
    words = ["check", "--source", str(source), "--target", str(target)]
    assert run([*words, "--json", str(tmp_path / "found" / "check.json")]) == 0
    out = capsys.readouterr().out
    assert "broken00.jpg" in out
    assert "broken19.jpg" in out
    assert "and 1 more: --json FILE lists all" in out
    found = json.loads((tmp_path / "found" / "check.json").read_text())
    assert len(found["target_unreadable"]) == LISTED_FILES
    assert found["target_empty"] == ["nothing.png"]


def test_check_exits_with_2_if_adaptation_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_domain(tmp_path / "source", flat=True)
    assert run(["check", "--source", str(source), "--target", str(source)]) == 2
    assert "cannot start" in capsys.readouterr().out
