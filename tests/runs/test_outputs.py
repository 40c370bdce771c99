"""Commands do not overwrite images, files of a run, their own input, devices or pipes."""

import os
import socket
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

import certvol
from certvol.cli._main import run
from certvol.errors import UserError
from certvol.runs.outputs import check_output, check_outside, write_output


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
        ("new/", "is a folder"),
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


def test_a_file_that_the_run_does_not_have_yet_is_refused(made: Path) -> None:
    for name in ("review.csv", "metrics.json"):
        assert not (made / "run" / name).exists()
        with pytest.raises(UserError, match="is a file of the run"):
            check_output(made / "run" / name)


def test_only_the_command_that_writes_features_replaces_a_file_of_features(made: Path) -> None:
    (made / "f.npz").write_text("features")
    (made / "link.csv").symlink_to(made / "f.npz")
    for name in ("f.npz", "link.csv"):
        with pytest.raises(UserError, match="is an existing file of features"):
            check_output(made / name)
        check_output(made / name, replaces_features=True)
    check_output(made / "new.npz")


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


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "run", "f.npz", "--out"],
        ["evaluate", "run", "--data", "f.npz", "--json"],
        ["evaluate", "run", "--data", ".", "--unknown", "f.npz", "--json"],
        ["check", "--source", "f.npz", "--target", "t.npz", "--json"],
        ["check", "--source", "s.npz", "--target", "f.npz", "--json"],
    ],
)
@pytest.mark.parametrize("place", ["f.npz", "./f.npz", "link.csv", "hard.csv"])
def test_an_input_of_the_command_is_refused(
    made: Path,
    command: list[str],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made)
    np.savez("f.npz", features=np.eye(3))
    Path("link.csv").symlink_to("f.npz")
    Path("hard.csv").hardlink_to("f.npz")
    before = Path("f.npz").read_bytes()
    assert run([*command, place]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert Path("f.npz").read_bytes() == before


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_output(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "a,b\n")
    reader.join(timeout=600)
    assert found == ["a,b\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    """Through a link: a faulty version must not replace the device of this machine."""
    link = tmp_path / "null.csv"
    link.symlink_to("/dev/null")
    check_output(link)
    write_output(link, "text")
    assert stat.S_ISCHR(link.stat().st_mode)
    assert link.is_symlink()


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("s")
        with pytest.raises(UserError, match="is a disk or a socket"):
            check_output("s")


@pytest.mark.parametrize("place", ["a\0b", "loop", "notes.csv/x", "x" * 300])
def test_an_impossible_place_is_refused_in_a_sentence(made: Path, place: str) -> None:
    (made / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"cannot write --out"):
        check_output(made / place)


def test_a_folder_inside_images_is_refused_through_links_too(made: Path) -> None:
    (made / "images" / "cat").mkdir(parents=True)
    (made / "alias").symlink_to("images")
    for place in ("images/out", "images", "images/cat/deep/out", "alias/out"):
        with pytest.raises(UserError, match="would be read as images"):
            check_outside(made / place, [None, made / "images"])
        with pytest.raises(UserError, match="would be read as images"):
            certvol.adapt(made / "images", made / "run", out=made / place)
        with pytest.raises(UserError, match="would be read as images"):
            certvol.adapt(made / "run", made / "alias", out=made / place)
    check_outside(made / "images-out", [made / "images"])
    assert sorted(path.name for path in (made / "images").rglob("*")) == ["cat"]


@pytest.mark.parametrize("setting", ["target", "more_sources", None])
def test_figures_of_a_report_are_not_written_among_images(
    setting: str | None, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "images").mkdir()
    value = f"{made / 'other'}{os.pathsep}{made / 'images'}" if setting == "more_sources" else ""
    content = f"data:\n  {setting}: {value or made / 'images'}\n" if setting else "data:\n"
    (made / "run" / "config.yaml").write_text(content)
    words = [] if setting else ["--target", str(made / "images")]
    page = str(made / "images" / "page.html")
    assert run(["report", str(made / "run"), "--out", page, "--figures", *words]) == 2
    assert "would be read as images" in capsys.readouterr().err
    assert not list((made / "images").iterdir())
