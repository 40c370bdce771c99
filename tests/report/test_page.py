"""Reports are written where they should be, and never cost a finished run."""

from pathlib import Path

import pytest

from certvol.errors import Interrupted, UserError
from certvol.progress import Silent
from certvol.report import page
from support.made_runs import make_run
from support.markup import Markup


def test_names_that_are_not_unicode_can_be_written(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    table = made.path / "measures.csv"
    table.write_bytes(table.read_bytes().replace(b"00003.png", b"\xff\xfe.png"))
    place = page.write_report(made.path, Silent())
    assert "\\udcff\\udcfe.png" in place.read_text(encoding="utf-8")


def test_target_names_the_folder_that_images_were_moved_to(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    moved = made.target.rename(tmp_path / "moved")
    text = page.write_report(made.path, Silent()).read_text()
    assert "was not found" in Markup(text).words
    assert 'id="sheet-0"' not in text
    text = page.write_report(made.path, Silent(), moved).read_text()
    assert "was not found" not in Markup(text).words
    assert 'id="sheet-0"' in text


def test_a_target_folder_without_the_images_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UserError, match="none of the run's images"):
        page.write_report(made.path, Silent(), tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a folder"):
        page.write_report(made.path, Silent(), tmp_path / "nowhere")


def test_a_failed_report_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path, count=12)
    warnings: list[str] = []
    reporter = Silent()
    monkeypatch.setattr(reporter, "warn", warnings.append)

    def fail(*_: object) -> str:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(page, "run_page", fail)
    assert page.report_on_finished(made.path, reporter) is None
    (warning,) = warnings
    assert "the run is complete" in warning
    assert "no such luck" in warning
    assert f"certvol report {made.path}" in warning


def test_stopping_a_report_says_that_the_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> str:
        raise Interrupted("stopped", 130)

    monkeypatch.setattr(page, "run_page", stop)
    with pytest.raises(Interrupted, match="only its report was stopped") as stopped:
        page.report_on_finished(make_run(tmp_path, count=12).path, Silent())
    assert stopped.value.exit_code == 130


def test_a_report_newer_than_the_model_is_kept(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    place = page.report_on_finished(made.path, Silent())
    assert place is not None
    place.write_text("mine")
    assert page.report_on_finished(made.path, Silent()) == place
    assert place.read_text() == "mine"
