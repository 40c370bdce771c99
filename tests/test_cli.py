"""The command as a user meets it: what it prints, what it exits with, what it refuses."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from certvol.cli import LISTED_FILES, run
from images import TINY, write_domain

SETTINGS = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("domains")
    return str(write_domain(root / "source")), str(write_domain(root / "target", shift=20, seed=1))


@pytest.fixture(scope="module")
def finished(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(["adapt", "--source", folders[0], "--target", folders[1], "--out", str(out), *SETTINGS]) == 0
    return str(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one sentence on stderr of a command that must fail."""
    assert run(arguments) == code
    captured = capsys.readouterr()
    last = [line for line in captured.err.splitlines() if line.startswith("certvol: ")]
    assert len(last) == 1, captured.err
    assert "Traceback" not in captured.err
    return last[0]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, certvol.cli as cli\n"
        "try: cli.run(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'timm', 'torchvision', 'sklearn', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "check", "adapt", "evaluate", "predict", "export", "list"):
        assert command in done.stdout


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "certvol", "list", "presets"], capture_output=True, text=True, check=True
    )
    for preset in ("default", "paper", "authors", "quick"):
        assert preset in done.stdout


def test_adapt_ends_with_a_table_and_the_place_of_the_predictions(
    finished: str, folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adapt", "--resume", finished]) == 0
    out = capsys.readouterr().out
    assert "source only" in out
    assert "adapted" in out
    assert "predictions.csv" in out


def test_evaluate_prints_and_writes_the_same_figures_as_the_run(
    finished: str, folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", finished, "--data", folders[1], "--json", str(tmp_path / "f.json")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    metrics = json.loads((Path(finished) / "metrics.json").read_text())
    for key in ("source_only", "adapted"):
        assert found[key] == metrics[key]
    out = capsys.readouterr().out
    assert f"{100 * found['adapted']['accuracy']:.1f}" in out
    assert "leaf" in out


def test_predict_takes_folders_files_and_globs(finished: str, folders: tuple[str, str], tmp_path: Path) -> None:
    target = Path(folders[1])
    out = tmp_path / "p.csv"
    words = [str(target / "leaf"), str(target / "sky" / "0.png"), str(target / "apple" / "1*.png")]
    assert run(["predict", finished, *words, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 + 1 + 3
    with (Path(finished) / "predictions.csv").open() as file:
        expected = {row["path"]: row for row in csv.DictReader(file)}
    for row in rows:
        before = expected[str(Path(row["path"]).relative_to(target))]
        assert row["label"] == before["label"]
        assert float(row["probability"]) == pytest.approx(float(before["probability"]), abs=1e-4)
        assert float(row["sigma"]) == pytest.approx(float(before["sigma"]), abs=1e-4)


def test_predict_with_coverage_rejects_the_least_certain(
    finished: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    assert run(["predict", finished, folders[1], "--out", str(out), "--coverage", "0.75"]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    accepted = [float(row["sigma"]) for row in rows if row["accepted"] == "true"]
    rejected = [float(row["sigma"]) for row in rows if row["accepted"] == "false"]
    assert 26 <= len(accepted) <= 28
    assert min(accepted) >= max(rejected)
    assert run(["predict", finished, folders[1], "--out", str(out), "--coverage", "1"]) == 0
    assert "false" not in out.read_text()


def test_predict_skips_what_is_no_image(finished: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jpg").write_text("no image")
    Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    assert run(["predict", finished, str(tmp_path), "--out", str(tmp_path / "p.csv")]) == 0
    assert "1 unreadable" in capsys.readouterr().out
    assert "none of the 1 files can be read" in refused(
        capsys, "predict", finished, str(tmp_path / "a.jpg"), "--out", str(tmp_path / "q.csv")
    )
    assert (tmp_path / "p.csv").read_text().count("\n") == 2


def test_check_prints_counts(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--source", folders[0], "--target", folders[1]]) == 0
    out = capsys.readouterr().out
    for name in ("apple", "leaf", "sky"):
        assert name in out
    assert "adaptation can start" in out


def test_check_lists_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_domain(source)
    write_domain(target, flat=True)
    for number in range(LISTED_FILES):
        (target / f"broken{number:02d}.jpg").write_bytes(b"no image")
    (target / "nothing.png").touch()
    words = ["check", "--source", str(source), "--target", str(target)]
    assert run([*words, "--json", str(tmp_path / "found" / "check.json")]) == 0
    out = capsys.readouterr().out
    assert "broken00.jpg" in out
    assert "broken19.jpg" in out
    assert "and 1 more: --json FILE lists all" in out
    found = json.loads((tmp_path / "found" / "check.json").read_text())
    assert len(found["target_unreadable"]) == LISTED_FILES
    assert found["target_empty"] == ["nothing.png"]


def test_check_exits_2_where_adaptation_could_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_domain(tmp_path / "source", flat=True)
    assert run(["check", "--source", str(source), "--target", str(source)]) == 2
    assert "cannot start" in capsys.readouterr().out


def test_list_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "methods"]) == 0
    out = capsys.readouterr().out
    for name in ("cvp", "basic", "source_only"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adpat"], "did you mean `adapt`?"),
        (["adapt", "--target", "T", "--out", "O"], "no source folder"),
        (["adapt", "--source", "S", "--out", "O"], "no target folder"),
        (["adapt", "--source", "S", "--target", "T"], "--out"),
        (["adapt", "--sorce", "S"], "did you mean `--source`?"),
        (["adapt", "--training.cycles"], "needs a value"),
        (["adapt", "--resume", "nowhere"], "holds no run"),
        (["adapt", "--resume", "x", "--training.cycles", "3"], "as it was begun"),
        (["adapt", "--resume", "x", "--preset", "paper"], "as it was begun"),
        (["adapt", "--config", "no.yaml"], "cannot read"),
        (["evaluate", "nowhere", "--data", "x"], "holds no run"),
        (["predict", "nowhere", "x", "--out", "y"], "no file, folder or match"),
        (["predict", "nowhere"], "required"),
        (["list", "nothing"], "invalid choice"),
        (["check", "--source", "nowhere", "--target", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--training.cyles", "3"], "did you mean `training.cycles`?"),
        (["--training.cycles", "many"], "whole number"),
        (["--method", "cpv"], "did you mean `cvp`?"),
        (["--preset", "papr"], "did you mean `paper`?"),
        (["--backbone", "resnet5O"], "resnet50"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--device", "cuda:77"], "CUDA"),
        (["--device", "gpu"], "no device"),
    ],
)
def test_wrong_settings_leave_nothing_behind(
    extra: list[str], words: str, folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    base = ["adapt", "--source", folders[0], "--target", folders[1], "--out", str(out), "--backbone", "small_cnn"]
    assert words in refused(capsys, *base, *extra)
    assert not out.exists()


def _adapt(source: Path, target: Path, out: Path) -> list[str]:
    return ["adapt", "--source", str(source), "--target", str(target), "--out", str(out), *SETTINGS]


def test_folders_that_do_not_work(folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = Path(folders[0]), tmp_path / "run"
    empty = tmp_path / "empty"
    empty.mkdir()
    flat = write_domain(tmp_path / "flat", flat=True)
    one = tmp_path / "one"
    (one / "apple").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(one / "apple" / "0.png")
    broken = tmp_path / "broken"
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
        (good.parent, good, "source"),
    ):
        sentence = refused(capsys, *_adapt(source, target, out))
        assert words in sentence, sentence
        assert not out.exists()


def test_unreadable_images_are_skipped_and_counted(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_domain(tmp_path / "target")
    (target / "apple" / "text.jpg").write_text("no image")
    (target / "apple" / "zero.png").write_bytes(b"")
    whole = (target / "leaf" / "0.png").read_bytes()
    (target / "leaf" / "torn.png").write_bytes(whole[: len(whole) // 2])
    assert run(_adapt(Path(folders[0]), target, tmp_path / "run")) == 0
    assert "3 unreadable target images were skipped" in capsys.readouterr().err
    assert (tmp_path / "run" / "predictions.csv").read_text().count("\n") == 37


def test_no_space_left_is_said(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr("certvol.training.checkpoint.os.fsync", full)
    sentence = refused(capsys, *_adapt(Path(folders[0]), Path(folders[1]), tmp_path / "run"))
    assert "no space left" in sentence.lower()


def test_a_file_that_cannot_grow_is_said_and_the_run_goes_on_afterwards(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    """A real limit of the system: weights do not fit under it."""
    out = tmp_path / "run"
    words = _adapt(Path(folders[0]), Path(folders[1]), out)
    limited = ["bash", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "limited", sys.executable, "-m", "certvol"]
    done = subprocess.run([*limited, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "too large" in done.stderr
    assert not list(out.rglob("*.part"))
    assert run(["adapt", "--resume", str(out)]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_say_how_to_go_on(number: int, code: int, folders: tuple[str, str], tmp_path: Path) -> None:
    words = [*_adapt(Path(folders[0]), Path(folders[1]), tmp_path / "run"), "--training.pretrain_steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "certvol", *words], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    history = tmp_path / "run" / "history.jsonl"
    deadline = time.monotonic() + 60
    while not history.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert "--resume" in error
    assert "Traceback" not in error
    assert (tmp_path / "run" / "checkpoint" / "latest.json").exists()


def test_a_signal_that_also_ended_the_reader_of_stderr_saves(folders: tuple[str, str], tmp_path: Path) -> None:
    """As Ctrl-C does with `2>&1 | tee log`."""
    words = [*_adapt(Path(folders[0]), Path(folders[1]), tmp_path / "run"), "--training.pretrain_steps", "100000"]
    process = subprocess.Popen([sys.executable, "-m", "certvol", *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "history.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert (tmp_path / "run" / "checkpoint" / "latest.json").exists()


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(folders: tuple[str, str], tmp_path: Path) -> None:
    words = [*SETTINGS, "--training.pretrain_steps", "60", "--training.checkpoint_seconds", "0"]
    base = ["adapt", "--source", folders[0], "--target", folders[1]]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "certvol", *base, "--out", str(killed), *words], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (killed / "checkpoint" / "latest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (killed / "model.safetensors").exists()
    assert run(["adapt", "--resume", str(killed)]) == 0
    assert run([*base, "--out", str(whole), *words]) == 0
    certainty = ("measures.csv", "evaluation.json", "features.safetensors")
    for name in ("model.safetensors", "predictions.csv", "history.jsonl", *certainty):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_signal_while_images_are_decoded_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_domain(tmp_path / "source", per_class=1500)
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    words = [*_adapt(source, source, tmp_path / "run"), "--data.image_size", "224", "--data.workers", "1"]
    process = subprocess.Popen([sys.executable, "-m", "certvol", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*.building")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143, error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_relative_places_in_a_file_hold_from_anywhere(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(folders[0]).parent)
    settings = tmp_path / "settings.yaml"
    settings.write_text("data:\n  source: source\n  target: target\n")
    assert run(["adapt", "--config", str(settings), "--out", str(tmp_path / "run"), *SETTINGS]) == 0
    (tmp_path / "run" / "model.safetensors").unlink()
    monkeypatch.chdir("/")
    assert run(["adapt", "--resume", str(tmp_path / "run")]) == 0


def test_a_run_folder_that_is_taken_is_refused_before_anything_is_decoded(
    finished: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_domain(tmp_path / "source")
    assert run(_adapt(source, source, Path(finished))) == 2
    error = capsys.readouterr().err
    assert "holds another run" in error
    assert "decoding" not in error


@pytest.mark.parametrize("option", ["--source", "--target", "--out", "--weights", "--data.cache_dir"])
def test_an_empty_path_is_not_the_current_folder(
    option: str,
    folders: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of a shell's variable that is not set."""
    monkeypatch.chdir(tmp_path)
    given = {"--source": folders[0], "--target": folders[1], "--out": "run", option: ""}
    message = refused(capsys, "adapt", *(word for pair in given.items() for word in pair), *SETTINGS)
    assert "found ''" in message if option == "--data.cache_dir" else f"`{option[2:]}` was given as nothing" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["report", ""], ["predict", "run", "", "--out", "p.csv"]])
def test_an_empty_name_among_several_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "was given as nothing" in refused(capsys, *words)


def test_a_broken_pipe_does_not_cost_the_figures(
    finished: str, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("certvol.console.print_table", broken)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert run(["evaluate", finished, "--data", folders[1], "--json", str(tmp_path / "f.json")]) == 2
    assert "adapted" in json.loads((tmp_path / "f.json").read_text())


def test_an_option_and_the_setting_it_is_short_for_do_not_differ(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", "--source", "a", "--target", "b", "--out", "c", "--seed", "1"]
    assert run([*words, "--training.seed", "2"]) == 2
    assert (
        "--seed is short for --training.seed, and they are given as 1 and 2: leave one out" in capsys.readouterr().err
    )
    assert run([*words, "--training.seed", "1"]) == 2
    assert "leave one out" not in capsys.readouterr().err
