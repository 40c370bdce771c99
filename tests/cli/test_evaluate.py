"""`certvol evaluate` prints and writes the figures that the run has."""

import errno
import json
from pathlib import Path

import pytest

from certvol.cli._main import run
from certvol.cli.evaluate import recommendations


def test_evaluate_gives_the_figures_of_the_run(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(finished), "--data", str(folders[1])]
    assert run([*words, "--json", str(tmp_path / "f.json")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    metrics = json.loads((finished / "metrics.json").read_text())
    for key in ("source_only", "adapted"):
        assert found[key] == metrics[key]
    out = capsys.readouterr().out
    assert f"{100 * found['adapted']['accuracy']:.1f}" in out
    assert "leaf" in out


def test_a_broken_stdout_does_not_cost_the_figures(
    finished: Path,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("certvol.cli._console.print_table", broken)
    monkeypatch.setattr("certvol.cli._main.discard", lambda stream: None)
    words = ["evaluate", str(finished), "--data", str(folders[1])]
    assert run([*words, "--json", str(tmp_path / "f.json")]) == 2
    assert "cannot write to stdout: no space left" in capsys.readouterr().err
    assert "adapted" in json.loads((tmp_path / "f.json").read_text())


def test_a_measure_is_recommended_with_its_worth() -> None:
    def advice(area: float | None) -> str:
        return next(recommendations({"recommended": "sigma", "auroc": {"sigma": area}}))

    assert advice(0.8) == "to find errors, use --measure sigma (AUROC 0.800)"
    assert advice(0.55).endswith("(AUROC 0.550, hardly better than guessing)")
    assert advice(None) == "there were no errors to find, so no --measure can be recommended"
