"""`certvol adapt`: what it prints, refuses and survives."""

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from certvol.cli._main import run
from support.commands import adapt_words, refused, wait_for, words_of
from support.images import TINY, write_domain
from support.processes import Forked, Surroundings

SIGNAL_WHILE_DECODING = """
import os, signal
from certvol.__main__ import main
from certvol.data import decoding
real, calls = decoding.decode, []
def watched(*given):
    calls.append(given)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(*given)
decoding.decode = watched
main()
"""


def fork(folder: Path, words: list[str], program: str = "") -> Forked:
    how = ["-c", program] if program else ["-m", "certvol"]
    return Forked([*how, *words], Surroundings(stderr=str(folder / "stderr")))


def test_adapt_ends_with_a_table_and_the_place_of_the_predictions(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adapt", "--resume", str(finished)]) == 0
    out = capsys.readouterr().out
    assert "before adaptation" in out
    assert "after adaptation" in out
    assert "predictions.csv" in out


def test_folders_that_cannot_be_used_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = folders[0], tmp_path / "run"
    empty, one, broken = tmp_path / "empty", tmp_path / "one", tmp_path / "broken"
    empty.mkdir()
    flat = write_domain(tmp_path / "flat", flat=True)
    (one / "apple").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(one / "apple" / "0.png")
    broken.mkdir()
    (broken / "a.jpg").write_text("no image")
    (broken / "b.png").write_bytes(b"")
    for source, target, words in (
        (tmp_path / "none", good, "none"),
        (good, tmp_path / "none", "none"),
        (empty, good, "no images"),
        (good, empty, "no images"),
        (flat, good, "class"),
        (one, good, "one class"),
        (good, broken, "can be read"),
    ):
        assert words in refused(capsys, *adapt_words(source, target, out))
        assert not out.exists()


def test_unreadable_images_are_skipped_and_counted(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_domain(tmp_path / "target")
    (target / "apple" / "text.jpg").write_text("no image")
    (target / "apple" / "zero.png").write_bytes(b"")
    whole = (target / "leaf" / "0.png").read_bytes()
    (target / "leaf" / "torn.png").write_bytes(whole[: len(whole) // 2])
    assert run(adapt_words(folders[0], target, tmp_path / "run")) == 0
    assert "3 unreadable target images were skipped" in capsys.readouterr().err
    assert (tmp_path / "run" / "predictions.csv").read_text().count("\n") == 37


def test_a_folder_that_holds_another_run_is_refused_before_decoding(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_domain(tmp_path / "source")
    assert run(adapt_words(source, source, finished)) == 2
    error = capsys.readouterr().err
    assert "holds another run" in error
    assert "decoding" not in error


def test_relative_folders_in_a_settings_file_work_from_anywhere(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[0].parent)
    settings, out = tmp_path / "settings.yaml", tmp_path / "run"
    settings.write_text("data:\n  source: source\n  target: target\n")
    assert run(["adapt", "--config", str(settings), "--out", str(out), *words_of(TINY)]) == 0
    (out / "model.safetensors").unlink()
    monkeypatch.chdir("/")
    assert run(["adapt", "--resume", str(out)]) == 0


def test_a_full_disk_is_reported(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr("os.fsync", full)
    assert "no space left: " in refused(capsys, *adapt_words(*folders, tmp_path / "run"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_run_and_says_how_to_resume(
    number: int, code: int, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = fork(tmp_path, adapt_words(*folders, out, training__pretrain_steps=100_000))
    wait_for(out, "history.jsonl")
    process.send_signal(number)
    assert process.wait(600) == code, process.errors
    assert "--resume" in process.errors
    assert "Traceback" not in process.errors
    assert (out / "checkpoint" / "latest.json").exists()


def test_a_signal_that_also_ended_the_reader_of_stderr_saves_the_run(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ctrl-C does this to `certvol adapt ... 2>&1 | tee log`."""
    out = tmp_path / "run"
    words = adapt_words(*folders, out, training__pretrain_steps=100_000)
    command = [sys.executable, "-m", "certvol", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_for(out, "history.jsonl")
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 130
    assert (out / "checkpoint" / "latest.json").exists()


def test_a_signal_during_decoding_stops_at_once(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    words = adapt_words(*folders, tmp_path / "run", data__workers=1)
    process = fork(tmp_path, words, SIGNAL_WHILE_DECODING)
    assert process.wait(600) == 143, process.errors
    assert "Traceback" not in process.errors
    assert not (tmp_path / "run").exists()


def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    settings: dict[str, Any] = {"training__pretrain_steps": 60, "training__checkpoint_seconds": 0}
    process = fork(tmp_path, adapt_words(*folders, killed, **settings))
    wait_for(killed, "checkpoint/latest.json")
    process.kill()
    process.wait(600)
    assert not (killed / "model.safetensors").exists()
    assert run(["adapt", "--resume", str(killed)]) == 0
    assert run(adapt_words(*folders, whole, **settings)) == 0
    certainty = ("measures.csv", "evaluation.json", "features.safetensors")
    for name in ("model.safetensors", "predictions.csv", "history.jsonl", *certainty):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
