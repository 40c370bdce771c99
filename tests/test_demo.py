"""`certvol demo`, as `make demo` runs it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certvol.api import resolve_settings
from certvol.cli._main import run
from certvol.demo import SETTINGS, _begun
from certvol.training.setup import with_trained_part
from support.commands import refused


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace training by a made-up accuracy; return the settings of the newest run."""
    newest: dict[str, Any] = {}

    def adapt(*_: object, **settings: Any) -> SimpleNamespace:
        newest.update(settings)
        accuracy = {"cvp": 0.75, "dann": 0.5}[settings["method.name"]]
        return SimpleNamespace(metrics={"adapted": {"accuracy": accuracy}})

    monkeypatch.setattr("certvol.demo.api.adapt", adapt)
    monkeypatch.setattr("certvol.report.page.report_on_finished", lambda *_: None)
    monkeypatch.setattr("certvol.report.page.write_comparison", lambda runs, out: out)
    return newest


@pytest.mark.usefixtures("instant")
def test_the_demo_ends_with_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert run(["demo", "--out", str(out), "--methods", "dann,cvp"]) == 0
    assert json.loads((out / "summary.json").read_text()) == {"dann": 0.5, "cvp": 0.75}
    printed = capsys.readouterr().out
    assert "75.0" in printed
    assert "certvol adapt --source LABELLED --target UNLABELLED --out RUN" in printed


@pytest.mark.usefixtures("instant")
def test_a_folder_whose_name_is_not_unicode_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    assert run(["demo", "--out", out, "--methods", "cvp"]) == 0
    assert r"caf\xe9/<method>/" in capsys.readouterr().out


def test_the_demo_takes_settings(
    tmp_path: Path, instant: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--out", str(tmp_path / "demo"), "--methods", "cvp"]
    assert run([*words, "--training.cycles", "2", "--data.image_size", "8"]) == 0
    assert (instant["training.cycles"], instant["data.image_size"]) == ("2", "8")
    words[2] = str(tmp_path / "other")
    assert "did you mean" in refused(capsys, *words, "--training.cycle", "2")
    assert not (tmp_path / "other").exists()


def test_an_unknown_method_fails_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--out", str(tmp_path / "other"), "--methods", "dan2"]
    assert "did you mean `dan`" in refused(capsys, *words)
    assert not (tmp_path / "other").exists()


def test_the_demo_leaves_a_users_data_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "data" / "source" / "cats" / "1.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert "move it away" in refused(capsys, "demo", "--out", str(tmp_path))
    assert mine.read_bytes() == b"mine"


def test_the_demo_does_not_replace_a_summary_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text("mine")
    assert "no demo wrote" in refused(capsys, "demo", "--out", str(tmp_path))
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_other_settings_do_not_show_the_results_of_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**SETTINGS, "method.name": "cvp", "training.seed": 0}
    config = with_trained_part(resolve_settings("quick", settings=given))
    (tmp_path / "cvp").mkdir()
    (tmp_path / "cvp" / "config.yaml").write_text(config.to_yaml())
    assert _begun(tmp_path / "cvp", given)
    words = ["demo", "--out", str(tmp_path), "--methods", "cvp"]
    sentence = refused(capsys, *words, "--training.cycles", "2")
    assert "was made with `training.cycles` 60, now it is 2" in sentence
    assert "seed 0, not 1" in refused(capsys, *words, "--seed", "1")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_the_demo_adapts_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert run(["demo", "--out", str(out), "--seed", "0"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["source_only", "basic", "cvp"]
    printed = capsys.readouterr().out
    for method, accuracy in summary.items():
        metrics = json.loads((out / method / "metrics.json").read_text())
        assert metrics["adapted"]["accuracy"] == accuracy
        assert (out / method / "model.safetensors").exists()
        assert len((out / method / "predictions.csv").read_text().splitlines()) == 1798
        assert method in printed
        assert f"{100 * accuracy:.1f}" in printed
    for method in ("basic", "cvp"):
        assert summary[method] >= summary["source_only"] + 0.1
    before = (out / "cvp" / "model.safetensors").read_bytes()
    assert run(["demo", "--out", str(out), "--seed", "0"]) == 0
    assert (out / "cvp" / "model.safetensors").read_bytes() == before
    assert "seed 0, not 1" in refused(capsys, "demo", "--out", str(out), "--seed", "1")
