"""The embedded default, end to end, as `make demo` runs it."""

import json
import os
from pathlib import Path

import pytest

from certvol.cli import run


def test_a_place_whose_name_is_no_unicode_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("certvol.demo.run", lambda *words: {"cvp": 0.5})
    assert run(["demo", "--out", os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")]) == 0
    assert r"caf\xe9/<method>/" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_adapts_and_can_be_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run(["demo", "--out", str(out), "--seed", "0"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["source_only", "basic", "cvp"]
    for method, accuracy in summary.items():
        metrics = json.loads((out / method / "metrics.json").read_text())
        assert metrics["adapted"]["accuracy"] == accuracy
        assert (out / method / "model.safetensors").exists()
        assert len((out / method / "predictions.csv").read_text().splitlines()) == 1798
    for method in ("basic", "cvp"):
        assert summary[method] >= summary["source_only"] + 0.1
    printed = capsys.readouterr().out
    for method, accuracy in summary.items():
        assert method in printed
        assert f"{100 * accuracy:.1f}" in printed

    before = (out / "cvp" / "model.safetensors").read_bytes()
    assert run(["demo", "--out", str(out), "--seed", "0"]) == 0
    assert (out / "cvp" / "model.safetensors").read_bytes() == before
    assert run(["demo", "--out", str(out), "--seed", "1"]) == 2
    assert "seed 0, not 1" in capsys.readouterr().err


def test_any_methods_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("certvol.demo._accuracy", lambda method, *rest: {"dann": 0.5, "mcc": 0.25}[method])
    assert run(["demo", "--out", str(tmp_path / "demo"), "--methods", "dann,mcc"]) == 0
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == {"dann": 0.5, "mcc": 0.25}
    assert run(["demo", "--out", str(tmp_path / "other"), "--methods", "dan2"]) == 2
    assert "did you mean `dan`" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_demo_leaves_a_users_data_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "data" / "source" / "cats" / "1.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert run(["demo", "--out", str(tmp_path)]) == 2
    assert "move it away" in capsys.readouterr().err
    assert mine.read_bytes() == b"mine"
