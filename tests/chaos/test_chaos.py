"""Runs that are killed, starved of space, raced and handed poisoned files: they go on to the same bytes, or say why not.

`make chaos` does the first part at length; what all of it gives is in docs/reliability.md.
"""

import dataclasses
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import certvol
from certvol.cli import run
from certvol.errors import Interrupted
from certvol.training.checkpoint import digest_of
from chaos.driver import (
    PHASES,
    SETTINGS,
    Chain,
    Kill,
    Mark,
    Outcome,
    Play,
    Process,
    Scene,
    Whole,
    aims,
    chaos,
    one_chain,
    summary,
    undisturbed,
    words_of,
    write_images,
)
from stop_at import StopAt

# One for each kind of state that a method can have; `make chaos` kills runs of all.
METHODS = ["cvp", "basic", "can", "self_ensembling", "rsda_mstn", "gtda"]
KILLS = 30
LAST = "cvp"  # whose course has every phase


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_anywhere_a_run_ends_with_the_same_bytes(method: str, tmp_path: Path) -> None:
    kills = -(-KILLS // len(METHODS))
    said: list[str] = []
    outcome = chaos(tmp_path, [method], kills, METHODS.index(method), said.append, per_chain=(5, 5))
    assert not outcome.problems, "\n".join(said)
    assert len(outcome.kills) == kills


def test_every_run_that_adapts_is_aimed_at_while_it_does() -> None:
    marks = [Mark(number, phase, 1.0) for number, phase in enumerate(("pretrain", "trial", "adapt", "prediction"))]
    whole = Whole({}, 9.0, 5.0, marks)
    for seed in range(50):
        drawn = aims(whole, 3, random.Random(seed))
        assert len(drawn) == 3
        assert "adapt" in drawn
        course = [aim for aim in drawn if aim in ("pretrain", "trial", "adapt", "prediction")]
        assert course == sorted(course, key=PHASES.index)
    pretrains = Whole({}, 9.0, 5.0, [marks[0], marks[3]])
    drawn = [aim for seed in range(50) for aim in aims(pretrains, 3, random.Random(seed))]
    assert set(drawn) == {"any", "start-up", "cache", "pretrain", "prediction"}


def test_the_summary_has_a_row_per_method_and_counts_what_differs() -> None:
    kills = [Kill("amid adapt", "adapt", False), Kill("at random", "cache", True)]
    text = summary(Outcome([Chain("cvp 1", "cvp", kills, ""), Chain("can 1", "can", kills[:1], "other bytes")], 60), 0)
    assert text.startswith("**2 of 3 kills")
    assert "| `cvp` | 0 | 1 | 0 | 0 | 1 | 0 | 2 |" in text
    assert "| all | 0 | 1 | 0 | 0 | 2 | 0 | 3 |" in text
    assert "- can 1 differs: other bytes" in text


@pytest.mark.slow
def test_other_bytes_in_any_file_are_noticed(scene: Scene, whole: Whole) -> None:
    """A driver that cannot fail would show nothing."""
    for name in (
        "model.safetensors",
        "cycles/best-ensv.safetensors",
        "cycles/trial-mixed/scores.jsonl",
        "measures.csv",
    ):
        assert name in whole.results
    other = dataclasses.replace(whole, results={**whole.results, "measures.csv": b"", "never written": b""})
    chain = one_chain(scene, other, random.Random(0), "noticed", 1)
    assert chain.problem.startswith("other bytes in measures.csv, never written (kept in")


# --- faults of one process after another ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("chaos")
    write_images(root)
    return Scene(root, LAST)


@pytest.fixture(scope="module")
def whole(scene: Scene) -> Whole:
    return undisturbed(scene)


def assert_same(play: Play, whole: Whole) -> None:
    for name, content in play.results().items():
        assert content == whole.results[name], name


def killed_when(play: Play, came: Callable[[], bool]) -> None:
    process = play.start()
    assert process.until(came), process.errors
    process.kill()


def one_sentence(errors: str) -> str:
    """The last word of a command that was refused or failed."""
    assert "Traceback" not in errors
    sentences = [line for line in errors.splitlines() if line.startswith("certvol: ")]
    assert len(sentences) == 1, errors
    return sentences[0]


def checkpoint_number(play: Play) -> int:
    return int(str(play.latest().get("number", 0)))


@pytest.mark.slow
def test_a_folder_that_a_kill_left_with_a_lock_or_half_its_settings_can_be_used_again(
    scene: Scene, whole: Whole
) -> None:
    play = scene.play("early")
    play.run.mkdir()
    (play.run / "lock").touch()
    (play.run / "config.yaml.part").write_text("method:\n  na")
    play.finish()
    assert_same(play, whole)


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over_with_a_warning(scene: Scene, whole: Whole) -> None:
    play = scene.play("torn")
    killed_when(play, lambda: checkpoint_number(play) >= 4)
    newest = play.run / "checkpoint" / str(play.latest()["file"])
    os.truncate(newest, newest.stat().st_size // 2)
    process = play.finish()
    assert f"{newest.name} cannot be used" in process.errors
    assert "going on from pretrain" in process.errors
    assert_same(play, whole)


@pytest.mark.slow
def test_the_first_checkpoint_after_the_trials_can_be_torn_too(scene: Scene, whole: Whole) -> None:
    """The one before it still needs what the trials left."""
    rare = Scene(scene.root, LAST, {**SETTINGS, "training.checkpoint_seconds": 10_000})
    play = rare.play("torn-after-trials")

    def chosen() -> bool:
        return play.position().get("phase") == "adapt" and not (play.run / "checkpoint" / "trial-per_domain").exists()

    killed_when(play, chosen)
    newest = play.run / "checkpoint" / str(play.latest()["file"])
    os.truncate(newest, newest.stat().st_size // 2)
    assert "cannot be used" in play.finish().errors
    assert_same(play, whole)


@pytest.mark.slow
def test_a_second_process_is_refused_and_harms_nothing(scene: Scene, whole: Whole) -> None:
    play = scene.play("raced")
    first = play.start()
    assert first.until(lambda: checkpoint_number(play) >= 1), first.errors
    first.popen.send_signal(signal.SIGSTOP)  # alive, and sure not to be done before the others
    try:
        resumer, beginner = play.start(), play.start(play.begin_words())
        assert resumer.wait() == 2
        assert "another process is writing the run" in one_sentence(resumer.errors)
        assert beginner.wait() == 2
        assert "holds another run" in one_sentence(beginner.errors)
    finally:
        first.popen.send_signal(signal.SIGCONT)
    assert first.wait() == 0, first.errors
    assert_same(play, whole)


# --- disks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_a_limit_of_file_size_a_run_stops_with_a_sentence_and_goes_on_later(scene: Scene, whole: Whole) -> None:
    """A limit that weights keep and the full state does not."""
    play = scene.play("limited")
    limited = [
        "bash",
        "-c",
        'ulimit -f 1500; trap "" XFSZ; exec "$@"',
        "limited",
        sys.executable,
        "-m",
        "certvol",
    ]
    process = Process([*limited, *play.begin_words()], play.cache, play.run)
    assert process.wait() == 2, process.errors
    assert "too large" in one_sentence(process.errors)
    assert not list(play.run.rglob("*.part"))
    play.finish()
    assert_same(play, whole)


def mounts() -> bool:
    """Whether a process may mount a file system of its own, seen by nobody else."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


needs_mounts = pytest.mark.skipif(not mounts(), reason="this user cannot mount a tmpfs")

FULL_DISK = """
mount -t tmpfs -o size=$1 none "$2"
run=$2/run; limit=$3; shift 3
"$@" --out "$run"; echo "full: $?" >&2
find "$run" -name "*.part" >&2
mount -o remount,size=100m "$(dirname "$run")"
"${@:1:4}" --resume "$run"; echo "after: $?" >&2
cp -r "$run" "$limit"
"""


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("size", ["1m", "9m"])
def test_on_a_full_disk_a_run_stops_with_a_sentence_and_goes_on_later(size: str, scene: Scene, whole: Whole) -> None:
    """Full at the first checkpoint, and when the trials begin."""
    play = scene.play(f"full-{size}")
    disk = scene.root / f"disk-{size}"
    disk.mkdir()
    certvol_words = [sys.executable, "-m", "certvol", *play.begin_words()]
    place = certvol_words.index("--out")
    del certvol_words[place : place + 2]
    words = ["unshare", "-rm", "bash", "-c", FULL_DISK, "disk", size, str(disk), str(play.run), *certvol_words]
    process = Process(words, play.cache, play.run)
    process.wait()
    full, _, after = process.errors.partition("full: 2\n")
    assert after, process.errors
    assert "no space left" in one_sentence(full).lower()
    assert ".part" not in after
    assert "after: 0" in after
    assert_same(play, whole)


READ_ONLY = """
mount -t tmpfs -o size=100m none "$1"
cp -r "$2" "$1/run"
mount -o remount,ro "$1"
"${@:3}" --resume "$1/run"; echo "read-only: $?" >&2
mount -o remount,rw "$1"
"${@:3}" --resume "$1/run"; echo "after: $?" >&2
rm -r "$2"; cp -r "$1/run" "$2"
"""


@needs_mounts
@pytest.mark.slow
def test_a_run_folder_that_has_become_read_only_is_said_and_goes_on_later(scene: Scene, whole: Whole) -> None:
    play = scene.play("read-only")
    killed_when(play, lambda: checkpoint_number(play) >= 3)
    disk = scene.root / "read-only-disk"
    disk.mkdir()
    words = [str(disk), str(play.run), sys.executable, "-m", "certvol", "adapt"]
    process = Process(["unshare", "-rm", "bash", "-c", READ_ONLY, "disk", *words], play.cache, play.run)
    process.wait()
    refused, _, after = process.errors.partition("read-only: 2\n")
    assert after, process.errors
    assert "read-only file system" in one_sentence(refused).lower()
    assert "after: 0" in after
    assert_same(play, whole)


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_a_checkpoint_folder_that_cannot_be_used_is_said_and_nothing_is_lost(
    alive: bool, scene: Scene, whole: Whole
) -> None:
    """A file in its place stands for every fault of writing there, which permissions would not be for root."""
    play = scene.play(f"blocked-{alive}")
    folder, aside = play.run / "checkpoint", play.run.with_name(f"{play.run.name}.aside")
    process = play.start()
    assert process.until(lambda: checkpoint_number(play) >= 3), process.errors
    process.popen.send_signal(signal.SIGSTOP)
    folder.rename(aside)
    folder.write_text("in the way")
    if alive:
        process.popen.send_signal(signal.SIGCONT)
    else:
        process.kill()
        process = play.start()
    assert process.wait() == 2, process.errors
    assert "checkpoint" in one_sentence(process.errors)
    folder.unlink()
    aside.rename(folder)
    play.finish()
    assert_same(play, whole)


@pytest.mark.slow
def test_a_run_folder_that_goes_away_is_said_and_the_run_goes_on_when_it_is_back(scene: Scene, whole: Whole) -> None:
    """As when the disk it lies on is taken away: nothing is made in its place."""
    play = scene.play("gone")
    process = play.start()
    assert process.until(lambda: checkpoint_number(play) >= 3), process.errors
    process.popen.send_signal(signal.SIGSTOP)
    play.run.rename(scene.root / "elsewhere")
    process.popen.send_signal(signal.SIGCONT)
    assert process.wait() == 2, process.errors
    assert str(play.run) in one_sentence(process.errors)
    assert not play.run.exists()
    (scene.root / "elsewhere").rename(play.run)
    play.finish()
    assert_same(play, whole)


@pytest.mark.slow
def test_decoded_images_that_are_cut_short_in_use_end_the_process_but_not_the_run(scene: Scene, whole: Whole) -> None:
    """They are mapped, so the system ends the process with SIGBUS; the next one decodes them again."""
    play = scene.play("cut-short")
    process = play.start()
    assert process.until(lambda: checkpoint_number(play) >= 3), process.errors
    process.popen.send_signal(signal.SIGSTOP)
    for pixels in play.cache.glob("*/pixels.bin"):
        os.truncate(pixels, 0)
    process.popen.send_signal(signal.SIGCONT)
    assert process.wait() == -signal.SIGBUS
    assert "are damaged" in play.finish().errors
    assert_same(play, whole)


# --- poisoned files --------------------------------------------------------------------------------------------------------


class Poison:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.fixture(scope="module")
def stopped(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a run stopped while adapting, the same run finished), made in this process."""
    root = tmp_path_factory.mktemp("stopped")
    settings = {"method.name": LAST, **SETTINGS}
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a fixture of the module is made before the environment of its first test
        patch.setenv("CERTVOL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        with pytest.raises(Interrupted):
            certvol.adapt(scene.source, scene.target, out=root / "part", stop_signal=StopAt(92), **settings)
        pointer = root / "part" / "checkpoint" / "latest.json"
        assert json.loads(pointer.read_text())[0]["facts"]["position"]["phase"] == "adapt"
        shutil.copytree(root / "part", root / "finished")
        assert run(["adapt", "--resume", str(root / "finished")]) == 0
    return root / "part", root / "finished"


@pytest.fixture
def poison(tmp_path: Path) -> tuple[bytes, Path]:
    """(a pickle that makes a folder when it is loaded, that folder): shown to work before it is used."""
    marker = tmp_path / "the payload ran"
    content = pickle.dumps(Poison(marker))
    pickle.loads(content)
    assert marker.exists()
    marker.rmdir()
    return content, marker


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the newest state", "every state", "the pointer"])
def test_a_pickle_in_place_of_a_checkpoint_is_passed_over(
    what: str,
    stopped: tuple[Path, Path],
    poison: tuple[bytes, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(stopped[0], tmp_path / "run")
    states = sorted((tmp_path / "run" / "checkpoint").glob("state-*.safetensors"))
    pointer = tmp_path / "run" / "checkpoint" / "latest.json"
    for path in {"the newest state": states[-1:], "every state": states, "the pointer": [pointer]}[what]:
        path.write_bytes(poison[0])
    code = run(["adapt", "--resume", str(tmp_path / "run")])
    errors = capsys.readouterr().err
    assert not poison[1].exists()
    assert "Traceback" not in errors
    if what == "the newest state":
        assert code == 0
        assert "cannot be used" in errors
        for name in ("model.safetensors", "history.jsonl", "predictions.csv"):
            assert (tmp_path / "run" / name).read_bytes() == (stopped[1] / name).read_bytes(), name
    else:  # begun anew, or refused; never silently
        assert code in (0, 1, 2)
        assert "checkpoint" in errors


@pytest.mark.slow
def test_a_state_whose_checksum_fits_is_still_never_unpickled(
    stopped: tuple[Path, Path], poison: tuple[bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever can put a file there can write its checksum too."""
    shutil.copytree(stopped[0], tmp_path / "run")
    pointer = tmp_path / "run" / "checkpoint" / "latest.json"
    entries = json.loads(pointer.read_text())
    (pointer.parent / entries[0]["file"]).write_bytes(poison[0])
    entries[0]["blake2b"] = digest_of(pointer.parent / entries[0]["file"], entries[0]["facts"])
    pointer.write_text(json.dumps(entries))
    assert run(["adapt", "--resume", str(tmp_path / "run")]) == 0
    assert "cannot be used" in capsys.readouterr().err
    assert not poison[1].exists()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (stopped[1] / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "pretrained.safetensors"])
def test_a_pickle_in_place_of_weights_is_refused(
    name: str,
    scene: Scene,
    stopped: tuple[Path, Path],
    poison: tuple[bytes, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    part, finished = tmp_path / "part", tmp_path / "finished"
    shutil.copytree(stopped[0], part)
    shutil.copytree(stopped[1], finished)
    for folder in (part, finished):
        (folder / name).write_bytes(poison[0])
    commands = [["adapt", "--resume", str(part)], ["evaluate", str(finished), "--data", str(scene.target)]]
    if name == "model.safetensors":
        commands.append(["adapt", "--resume", str(finished)])
        commands.append(["predict", str(finished), str(scene.target), "--out", str(tmp_path / "p.csv")])
    for words in commands:
        assert run(words) in (1, 2), words
        assert "damaged" in one_sentence(capsys.readouterr().err)
    assert not poison[1].exists()


@pytest.mark.slow
def test_a_pickle_given_as_weights_is_refused(
    scene: Scene, poison: tuple[bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("weights.pth", "weights.safetensors"):
        (tmp_path / name).write_bytes(poison[0])
        places = ["--source", str(scene.source), "--target", str(scene.target), "--out", str(tmp_path / "run")]
        assert run(["adapt", *places, *words_of(SETTINGS), "--weights", str(tmp_path / name)]) == 2
        assert name in one_sentence(capsys.readouterr().err)
    assert not poison[1].exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.json", "hashes.bin", "pixels.bin", "journal.jsonl"])
def test_a_pickle_in_place_of_decoded_images_is_noticed_and_they_are_decoded_again(
    name: str,
    stopped: tuple[Path, Path],
    poison: tuple[bytes, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = Path(os.environ["CERTVOL_CACHE"])
    shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(stopped[0], tmp_path / "run")
    sets = [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]
    assert sets
    for folder in sets:
        if name == "journal.jsonl":  # of a build that was cut short
            (folder / "index.json").unlink()
            folder.rename(folder.with_suffix(".building"))
            (folder.with_suffix(".building") / name).write_bytes(poison[0])
        else:
            (folder / name).write_bytes(poison[0])
    assert run(["adapt", "--resume", str(tmp_path / "run")]) == 0
    assert name == "journal.jsonl" or "are damaged" in capsys.readouterr().err
    assert not poison[1].exists()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (stopped[1] / "model.safetensors").read_bytes()
