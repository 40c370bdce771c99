"""A pickle in place of any file of a run is refused or noticed, and never loaded."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from certvol.cli._main import run
from support.commands import adapt_words, last_sentence, refused
from support.sealed import reseal


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The folder that a payload makes; shown to work before it is used."""
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Payload(mark)))
    mark.rmdir()
    return mark


@pytest.fixture(params=["plain", "torch zip", "torch legacy"])
def evil(request: pytest.FixtureRequest, mark: Path, tmp_path: Path) -> bytes:
    """A file that runs code when it is unpickled, in every format that torch reads."""
    if request.param == "plain":
        return pickle.dumps(Payload(mark))
    content = {"x": torch.ones(2), "extra": Payload(mark)}
    file = tmp_path / "evil"
    torch.save(content, file, _use_new_zipfile_serialization=request.param == "torch zip")
    return file.read_bytes()


@pytest.mark.parametrize(("states", "sealed"), [("newest", False), ("newest", True), ("all", True)])
def test_a_pickle_in_place_of_checkpoints_is_passed_over(
    states: str,
    sealed: bool,
    runs: Path,
    evil: bytes,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped, complete = runs / "stopped", runs / "complete"
    found = sorted((stopped / "checkpoint").glob("state-*.safetensors"))
    for state in found[-1:] if states == "newest" else found:
        state.write_bytes(evil)
    if sealed:
        reseal(stopped / "checkpoint")
    code = run(["adapt", "--resume", str(stopped)])
    errors = capsys.readouterr().err
    assert not mark.exists()
    assert "Traceback" not in errors
    assert "is damaged" in errors
    if states == "newest":
        assert code == 0
        for name in ("model.safetensors", "history.jsonl", "predictions.csv"):
            assert (stopped / name).read_bytes() == (complete / name).read_bytes(), name


def test_a_pickle_in_place_of_the_checkpoint_list_is_noticed(
    runs: Path, evil: bytes, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "stopped" / "checkpoint" / "latest.json").write_bytes(evil)
    run(["adapt", "--resume", str(runs / "stopped")])
    errors = capsys.readouterr().err
    assert "checkpoint" in errors
    assert "Traceback" not in errors
    assert not mark.exists()


def test_a_pickle_in_place_of_weights_is_refused(
    runs: Path, made: Path, evil: bytes, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete, target, out = str(runs / "complete"), str(made / "target"), str(runs / "p.csv")
    for place in (
        runs / "complete" / "model.safetensors",
        runs / "stopped" / "pretrained.safetensors",
    ):
        place.write_bytes(evil)
    for words in (
        ["adapt", "--resume", str(runs / "stopped")],
        ["adapt", "--resume", complete],
        ["evaluate", complete, "--data", target],
        ["predict", complete, target, "--out", out],
    ):
        assert run(words) in (1, 2), words
        assert "damaged" in last_sentence(capsys.readouterr().err)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_a_pickle_given_as_weights_is_refused(
    name: str,
    folders: tuple[Path, Path],
    evil: bytes,
    mark: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(evil)
    words = adapt_words(*folders, tmp_path / "run", model__weights=tmp_path / name)
    assert name in refused(capsys, *words)
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["index.json", "hashes.bin", "pixels.bin", "journal.jsonl"])
def test_a_pickle_in_the_cache_is_noticed_and_images_are_decoded_again(
    name: str,
    made: Path,
    runs: Path,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = mark.with_name("cache")
    shutil.copytree(made / "cache", cache)
    monkeypatch.setenv("CERTVOL_CACHE", str(cache))
    sets = [folder for folder in cache.iterdir() if folder.is_dir()]
    assert sets
    for folder in sets:
        place = folder
        if name == "journal.jsonl":  # a build that was interrupted
            (folder / "index.json").unlink()
            place = folder.rename(folder.with_suffix(".building"))
        (place / name).write_bytes(pickle.dumps(Payload(mark)))
    assert run(["adapt", "--resume", str(runs / "stopped")]) == 0
    assert name == "journal.jsonl" or "are damaged" in capsys.readouterr().err
    assert not mark.exists()
    delivered = [runs / run / "model.safetensors" for run in ("stopped", "complete")]
    assert delivered[0].read_bytes() == delivered[1].read_bytes()
