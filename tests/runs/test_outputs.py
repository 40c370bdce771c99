"""Commands do not overwrite images or files of a run."""

from pathlib import Path

import pytest

from certvol.cli._main import run
from certvol.errors import UserError
from certvol.runs.outputs import check_output


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with files named like an image and a run."""
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
        ("cat.PNG", "is an existing image"),
        ("run/model.safetensors", "is a file of the run"),
        ("run", "is a folder"),
    ],
)
def test_an_image_a_file_of_a_run_and_a_folder_are_refused_before_any_work(
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
    [
        "config.yaml",
        "environment.json",
        "lock",
        "checkpoint/file",
        "cycles/file",
        "model.safetensors",
    ],
)
def test_every_file_of_a_run_is_refused(made: Path, place: str) -> None:
    with pytest.raises(UserError, match="is a file of the run"):
        check_output(made / "run" / place)


def test_a_link_to_a_file_of_a_run_is_refused(made: Path) -> None:
    (made / "innocent.csv").symlink_to(made / "run" / "model.safetensors")
    with pytest.raises(UserError, match="is a file of the run"):
        check_output(made / "innocent.csv")


@pytest.mark.parametrize(
    "place",
    ["new.csv", "new.png", "notes.csv", "run/report.html", "run/mine.csv", "no/such/folder.csv"],
)
def test_other_files_may_be_written(made: Path, place: str) -> None:
    (made / "run" / "report.html").write_text("made of the run")
    check_output(made / place)


def test_a_config_file_alone_does_not_make_a_run(made: Path) -> None:
    (made / "run" / "environment.json").unlink()
    check_output(made / "run" / "model.safetensors")
