"""An odd environment, odd files and odd numbers give a sentence, never a traceback."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from certvol.cli._main import run
from certvol.data.feature_files import open_source_features, open_target_features
from certvol.data.folders import scan
from certvol.errors import RunFailed, UserError
from certvol.progress import place_in_team
from certvol.report.records import read_record
from certvol.settings import resolve
from certvol.training.setup import Job
from support.commands import adapt_words, refused
from support.made_runs import make_run
from support.reviews import made_for_review


@pytest.mark.parametrize(
    ("name", "word"), [("CERTVOL_CACHE", "~nosuchuser/x"), (None, "~labelled")]
)
def test_a_home_folder_of_nobody_is_refused(
    name: str | None,
    word: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = folders[0]
    if name is None:
        source = Path(word)
    else:
        monkeypatch.setenv(name, word)
    sentence = refused(capsys, *adapt_words(source, folders[1], tmp_path / "run"))
    assert word.partition("/")[0] in sentence
    assert "not a user's home folder" in sentence


def test_a_user_without_a_home_folder_is_told_what_to_set(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    words = adapt_words(*folders, tmp_path / "run")
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert run(words) == 0  # without a key, the run is one of nobody
    monkeypatch.delenv("CERTVOL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert "CERTVOL_CACHE" in refused(capsys, *adapt_words(*folders, tmp_path / "two"))


def test_files_dated_after_2262_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"x")
    os.utime(file, (2**34, 2**34))  # the year 2514
    if file.stat().st_mtime_ns < 2**63:
        pytest.skip("this file system has no such times")
    assert scan(tmp_path).file(0).mtime_ns == 2**63 - 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "1"}, (0, 1)),
        ({"RANK": "x"}, (0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "5"}, (0, 1)),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "x", "RANK": "0"}, "torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "is not valid"),
        (
            {"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "is not valid",
        ),
    ],
)
def test_half_of_the_variables_of_torchrun(
    given: dict[str, str], found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            place_in_team()
    else:
        assert place_in_team() == found


def test_a_lone_world_size_is_refused_by_the_command(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert "torchrun" in refused(capsys, *adapt_words(*folders, tmp_path / "run"))


# Files of features


def test_a_pipe_as_a_file_of_features_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(UserError, match="pipe or a device"):
        open_target_features(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "option", ["data.target_prior", "data.target_labels", "model.weights", "config"]
)
def test_a_pipe_or_a_device_as_another_input_is_not_waited_for(
    option: str, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (str(tmp_path / "pipe"), "/dev/zero"):
        words = adapt_words(*folders, tmp_path / "run")
        sentence = refused(capsys, *words, f"--{option}", place)
        assert "pipe or a device" in sentence or "special file" in sentence


def test_a_pipe_of_answers_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_for_review(tmp_path, 20)
    os.mkfifo(tmp_path / "pipe")
    words = ("review", str(made.path), "--import", str(tmp_path / "pipe"))
    assert "pipe or a device" in refused(capsys, *words)


def test_a_file_of_features_that_would_grow_beyond_measure_is_refused(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        array, {"descr": "<f4", "fortran_order": False, "shape": (75_000, 1000)}
    )
    place = tmp_path / "a.npz"
    with (
        zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("features.npy", "w") as file,
    ):
        file.write(array.getvalue())
        for _ in range(300):
            file.write(bytes(1_000_000))
    assert (tmp_path / "a.npz").stat().st_size < 1_000_000
    with pytest.raises(UserError, match="-fold"):
        open_target_features(tmp_path / "a.npz")


def test_labels_that_are_no_text_are_refused(tmp_path: Path) -> None:
    labels = np.frombuffer(np.array([0x7FFFFFFF, 0x110000], dtype="<u4").tobytes(), dtype="<U1")
    np.savez(tmp_path / "a.npz", features=np.eye(2, dtype=np.float32), labels=labels)
    with pytest.raises(UserError, match="invalid character codes"):
        open_source_features(tmp_path / "a.npz")


# Numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.max_megapixels", float("inf")),
        ("data.cache_limit_gb", 1e308),
        ("training.weight_decay", 1.7e308),
        ("training.mc_passes", 2**63),
        ("augment.rotate", 1e30),
        ("augment.shear", 1e30),
        ("augment.shift", 1e30),
        ("augment.scale", 1e30),
        ("augment.crop_aspect", 1e30),
        ("training.cycle_steps", 10**9),
        pytest.param("training.seed", 1 << 20_000, id="seed"),
        ("cdan:method.bottleneck", 2**31),
        ("cdan:method.discriminator_width", 2**31),
        ("rsda_dann:method.width", 2**31),
        ("jda:method.ridge", 5e-324),
        ("can:method.min_images", 10**30),
    ],
)
def test_a_number_that_no_run_can_mean_is_refused(name: str, value: object) -> None:
    from certvol.methods import config_classes

    method, _, setting = name.rpartition(":")
    with pytest.raises(UserError, match="should be") as caught:
        resolve(config_classes(), overrides={"method.name": method or "cvp", setting: value})
    assert len(str(caught.value)) < 300


def test_numbers_without_end_in_a_received_run_are_left_out(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    metrics = json.loads((made.path / "metrics.json").read_text())
    metrics["adapted"]["accuracy"] = 10**400
    (made.path / "metrics.json").write_text(json.dumps(metrics))
    lines = [{"phase": "all", "seconds": 1.7e308}] * 2
    (made.path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_record(made.path)
    assert record.metrics is None
    assert record.seconds is None
    assert run(["report", str(made.path)]) == 0


def test_a_network_without_end_in_a_received_run_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    config = made.path / "config.yaml"
    config.write_text(config.read_text().replace("small_cnn", "features-99999999999"))
    assert run(["predict", str(made.path), str(made.target), "--out", str(tmp_path / "p.csv")]) == 2


def test_too_little_memory_is_explained_with_the_settings_that_were_used() -> None:
    class Settings:
        batch_size = 24
        device_share = 0.5

    job = Job.__new__(Job)
    job.config = type("Config", (), {"training": Settings, "data": Settings})  # type: ignore[assignment]
    with pytest.raises(RunFailed, match=r"batch_size` \(now 24\)"), job.memory_explained():
        raise torch.OutOfMemoryError


# Signals


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_start_up_gives_no_traceback(
    number: signal.Signals, tmp_path: Path
) -> None:
    for tenth in (2, 9, 16):
        words = [sys.executable, "-m", "certvol", "predict", "nowhere", "x.png", "--out", "p.csv"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        time.sleep(tenth / 10)
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
        assert "Traceback" not in said
        assert process.returncode in (2, 128 + number)
