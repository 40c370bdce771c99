"""No command writes over images, or over what a run is made of."""

from pathlib import Path

import pytest

from certvol.cli import run
from certvol.errors import UserError
from certvol.outputs import check_output


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with an image and a run, as far as names go."""
    for name in (
        "cat.PNG",
        "run/config.yaml",
        "run/environment.json",
        "run/model.safetensors",
        "run/lock",
        "notes.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("checkpoint", "cycles"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "file").write_text(name)
    return tmp_path


COMMANDS = [
    ["predict", "run", ".", "--out"],
    ["evaluate", "run", "--data", ".", "--json"],
    ["check", "--source", ".", "--target", ".", "--json"],
    ["export", "run", "--format", "torch", "--out"],
    ["report", "run", "--out"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: str(words[0]))
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("cat.PNG", "is an image that is there already"),
        ("run/model.safetensors", "is a file of the run"),
        ("run", "is a folder"),
    ],
)
def test_what_would_be_lost_is_refused_before_any_work(
    made: Path,
    command: list[str],
    place: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made)
    assert run([*command, place]) == 2
    assert why in capsys.readouterr().err
    assert (made / "cat.PNG").read_text() == "cat.PNG"
    assert (made / "run" / "model.safetensors").read_text() == "run/model.safetensors"


@pytest.mark.parametrize(
    "place",
    ["config.yaml", "environment.json", "lock", "checkpoint/file", "cycles/file", "model.safetensors"],
)
def test_every_file_of_a_run_is_its_own(made: Path, place: str) -> None:
    with pytest.raises(UserError, match="is a file of the run"):
        check_output(made / "run" / place)


def test_a_link_to_a_file_of_a_run_is_that_file(made: Path) -> None:
    (made / "innocent.csv").symlink_to(made / "run" / "model.safetensors")
    with pytest.raises(UserError, match="is a file of the run"):
        check_output(made / "innocent.csv")


@pytest.mark.parametrize(
    "place", ["new.csv", "new.png", "notes.csv", "run/report.html", "run/mine.csv", "no/such/folder.csv"]
)
def test_other_places_are_free(made: Path, place: str) -> None:
    (made / "run" / "report.html").write_text("made of the run")
    check_output(made / place)


def test_settings_of_something_else_make_no_run(made: Path) -> None:
    (made / "run" / "environment.json").unlink()
    check_output(made / "run" / "model.safetensors")
