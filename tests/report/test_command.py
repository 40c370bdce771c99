"""`certvol report` on the command line, and the report at the end of `certvol adapt`."""

import json
from pathlib import Path

import pytest

from certvol.cli._main import run
from certvol.report import page
from support.images import tiny, write_domain
from support.made_runs import make_run


def _adapt(tmp_path: Path) -> list[str]:
    source = write_domain(tmp_path / "source")
    target = write_domain(tmp_path / "target", shift=20, seed=1)
    settings = [word for key, value in tiny().items() for word in (f"--{key}", str(value))]
    return [
        "adapt",
        "--source",
        str(source),
        "--target",
        str(target),
        "--out",
        str(tmp_path / "run"),
        *settings,
    ]


def test_adapt_ends_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_adapt(tmp_path)) == 0
    place = tmp_path / "run" / "report.html"
    assert f"report: {place}" in capsys.readouterr().out
    text = place.read_text()
    accuracy = json.loads((tmp_path / "run" / "metrics.json").read_text())["adapted"]["accuracy"]
    assert f"{100 * accuracy:.1f}<small>" in text
    assert 'id="sheet-0"' in text


def test_a_run_succeeds_even_if_its_report_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise MemoryError("too little")

    monkeypatch.setattr(page, "run_page", fail)
    assert run(_adapt(tmp_path)) == 0
    said = capsys.readouterr()
    assert "the run is complete, but its report could not be made" in said.err
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_report_and_its_figures_lie_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path, features=False)
    assert run(["report", str(made.path), "--figures"]) == 0
    said = capsys.readouterr().out
    assert (made.path / "report.html").exists()
    assert (made.path / "figures" / "sigma.svg").exists()
    assert "20 figures for papers" in said
    out = tmp_path / "else" / "where.html"
    assert run(["report", str(made.path), "--out", str(out), "--figures"]) == 0
    assert out.exists()
    assert (out.parent / "figures" / "sigma.svg").exists()


def test_the_help_says_where_figures_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["report", "--help"])
    assert "in figures/ beside the page" in " ".join(capsys.readouterr().out.split())


def test_several_runs_need_a_file_for_their_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run(tmp_path / name, seed=seed).path) for seed, name in enumerate("ab")]
    assert run(["report", *runs]) == 2
    assert "--out FILE" in capsys.readouterr().err
    out = tmp_path / "new" / "compared.html"
    assert run(["report", *runs, "--out", str(out), "--figures"]) == 0
    assert out.exists()
    assert (out.parent / "figures" / "risk-coverage.png").exists()
    assert not (tmp_path / "a" / "run" / "report.html").exists()


def test_a_wrong_folder_is_a_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    made = make_run(tmp_path, features=False)
    assert run(["report", str(made.path), "--target", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
