"""Runs that are killed, moved or out of disk space end with the bytes of an undisturbed one.

`make chaos` kills runs of all methods at length; docs/reliability.md has the results.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos import (
    PHASES,
    Chain,
    Kill,
    Mark,
    Plan,
    Reference,
    chaos,
    draw_aims,
    next_moment,
    one_chain,
    summary,
    undisturbed,
)
from chaos_runs import SETTINGS, SIGNALLED, Process, Setup, Subject, start_interpreter, write_images
from support.commands import last_sentence
from support.processes import Forked, Surroundings

# One for each kind of state that a method can have; `make chaos` kills runs of all.
METHODS = ["cvp", "basic", "can", "self_ensembling", "rsda_mstn", "gtda"]
KILLS = 30
METHOD = "cvp"  # has every phase


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_anywhere_ends_with_the_same_bytes(method: str, tmp_path: Path) -> None:
    kills = -(-KILLS // len(METHODS))
    said: list[str] = []
    plan = Plan(kills, seed=METHODS.index(method), per_chain=(5, 5))
    chains = chaos(tmp_path, [method], plan, said.append)
    assert not any(chain.problem for chain in chains), "\n".join(said)
    assert sum(len(chain.kills) for chain in chains) == kills


def test_every_chain_of_a_method_that_adapts_has_a_kill_during_adaptation() -> None:
    phases = ("pretrain", "trial", "adapt", "prediction")
    marks = [Mark(number, phase, 1.0) for number, phase in enumerate(phases)]
    adapts = Reference({}, 5.0, marks)
    for seed in range(50):
        drawn = draw_aims(adapts, 3, random.Random(seed))
        assert len(drawn) == 3
        assert "adapt" in drawn
        in_order = [aim for aim in drawn if aim in phases]
        assert in_order == sorted(in_order, key=PHASES.index)
    pretrains = Reference({}, 5.0, [marks[0], marks[3]])
    drawn = [aim for seed in range(50) for aim in draw_aims(pretrains, 3, random.Random(seed))]
    assert set(drawn) == {"any", "start-up", "cache", "pretrain", "prediction"}


def test_a_run_past_the_last_checkpoint_of_the_undisturbed_one_can_be_killed(
    tmp_path: Path,
) -> None:
    subject = Setup(tmp_path, METHOD).subject("further")
    (subject.run / "checkpoint").mkdir(parents=True)
    (subject.run / "checkpoint" / "latest.json").write_text('[{"number": 9}]')
    reference = Reference({}, 1.0, [Mark(1, "adapt", 1.0)])
    for aim in ("any", "pretrain", "trial", "adapt", "prediction"):
        assert next_moment(subject, reference, aim, random.Random(0)).name


def test_the_summary_has_a_row_per_method_and_counts_differences() -> None:
    kills = [Kill("amid adapt", "adapt", False), Kill("at random", "cache", True)]
    chains = [Chain("cvp 1", "cvp", kills, ""), Chain("can 1", "can", kills[:1], "other bytes")]
    text = summary(chains, seed=0, seconds=60)
    assert text.startswith("**2 of 3 kills")
    assert "| `cvp` | 0 | 1 | 0 | 0 | 1 | 0 | 2 |" in text
    assert "| all | 0 | 1 | 0 | 0 | 2 | 0 | 3 |" in text
    assert "- can 1 differs: other bytes" in text


def _fork(words: list[str], environment: dict[str, str], stderr: str) -> Any:
    if words[0] != sys.executable:
        return start_interpreter(words, environment, stderr)
    return Forked(words[1:], Surroundings(environment, stderr=stderr))


@pytest.fixture(scope="module", autouse=True)
def _forked_processes() -> Iterator[None]:
    """Kill forks: what happens before and while torch is imported is left to `make chaos`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chaos_runs.START", _fork)
        yield


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    root = tmp_path_factory.mktemp("chaos")
    write_images(root)
    return Setup(root, METHOD)


@pytest.fixture(scope="module")
def reference(setup: Setup) -> Reference:
    return undisturbed(setup)


def assert_same(subject: Subject, reference: Reference) -> None:
    found = subject.results()
    assert found.keys() == reference.results.keys()
    for name, content in found.items():
        assert content == reference.results[name], name


def killed_after(subject: Subject, calls: int, method: str = "save") -> None:
    """Run until the keeper's method was called so often, which kills the run."""
    number = signal.SIGKILL.value
    process = subject.start(program=SIGNALLED.format(method=method, calls=calls, number=number))
    assert process.wait() == -number, process.errors


def suspended_after(subject: Subject, calls: int) -> Process:
    """Run until so many checkpoints; the run then stays alive and cannot continue."""
    number = signal.SIGSTOP.value
    process = subject.start(program=SIGNALLED.format(method="save", calls=calls, number=number))
    assert process.is_suspended(), process.errors
    return process


@pytest.mark.slow
def test_the_driver_notices_other_bytes_in_any_file(setup: Setup, reference: Reference) -> None:
    for name in (
        "model.safetensors",
        "cycles/best-ensv.safetensors",
        "cycles/trial-mixed/scores.jsonl",
        "measures.csv",
    ):
        assert name in reference.results
    changed = {**reference.results, "measures.csv": b"", "never written": b""}
    other = dataclasses.replace(reference, results=changed)
    chain = one_chain(setup, other, random.Random(0), "noticed", 1)
    assert chain.problem.startswith("other bytes in measures.csv, never written (kept in")


@pytest.mark.slow
def test_a_folder_with_a_lock_and_half_its_settings_can_be_used_again(
    setup: Setup, reference: Reference
) -> None:
    subject = setup.subject("early")
    subject.run.mkdir()
    (subject.run / "lock").touch()
    (subject.run / "config.yaml.0123abcd.part").write_text("method:\n  na")
    subject.finish()
    assert_same(subject, reference)


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over_with_a_warning(
    setup: Setup, reference: Reference
) -> None:
    subject = setup.subject("torn")
    killed_after(subject, 4)
    newest = subject.run / "checkpoint" / str(subject.latest()["file"])
    os.truncate(newest, newest.stat().st_size // 2)
    process = subject.finish()
    assert f"checkpoint {newest.name} is damaged" in process.errors
    assert "resuming from pretrain" in process.errors
    assert_same(subject, reference)


@pytest.mark.slow
def test_the_first_checkpoint_after_the_trials_can_be_torn_too(
    setup: Setup, reference: Reference
) -> None:
    """The one before it still needs what the trials left."""
    rare = Setup(setup.root, METHOD, {**SETTINGS, "training.checkpoint_seconds": 10_000})
    subject = rare.subject("torn-after-trials")

    killed_after(subject, 1, "drop_trials")
    assert subject.position()["phase"] == "adapt"
    assert not (subject.run / "checkpoint" / "trial-per_domain").exists()
    newest = subject.run / "checkpoint" / str(subject.latest()["file"])
    os.truncate(newest, newest.stat().st_size // 2)
    assert "is damaged" in subject.finish().errors
    assert_same(subject, reference)


@pytest.mark.slow
def test_a_second_process_is_refused_and_harms_nothing(setup: Setup, reference: Reference) -> None:
    subject = setup.subject("raced")
    first = suspended_after(subject, 1)
    try:
        resumer, beginner = subject.start(), subject.start(subject.first_words())
        assert resumer.wait() == 2
        assert "another process is writing the run" in last_sentence(resumer.errors)
        assert beginner.wait() == 2
        assert "holds another run" in last_sentence(beginner.errors)
    finally:
        first.popen.send_signal(signal.SIGCONT)
    assert first.wait() == 0, first.errors
    assert_same(subject, reference)


@pytest.mark.slow
def test_a_file_size_limit_stops_a_run_that_can_be_resumed(
    setup: Setup, reference: Reference
) -> None:
    """Weights fit under the limit; the full state does not."""
    subject = setup.subject("limited")
    limited = ["bash", "-c", 'ulimit -f 1500; trap "" XFSZ; exec "$@"', "limited"]
    command = [sys.executable, "-m", "certvol", *subject.first_words()]
    process = Process([*limited, *command], subject.cache)
    assert process.wait() == 2, process.errors
    assert "too large" in last_sentence(process.errors)
    assert not list(subject.run.rglob("*.part"))
    subject.finish()
    assert_same(subject, reference)


def mounts() -> bool:
    """Return whether a process may mount a file system that no other process sees."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
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
def test_a_full_disk_stops_a_run_that_can_be_resumed(
    size: str, setup: Setup, reference: Reference
) -> None:
    """The disk is full at the first checkpoint, or when the trials begin."""
    subject = setup.subject(f"full-{size}")
    disk = setup.root / f"disk-{size}"
    disk.mkdir()
    words = subject.first_words()
    place = words.index("--out")
    del words[place : place + 2]
    places = [size, str(disk), str(subject.run), sys.executable, "-m", "certvol"]
    alone = ["unshare", "-rm", "bash", "-c", FULL_DISK, "disk"]
    process = Process([*alone, *places, *words], subject.cache)
    process.wait()
    full, _, after = process.errors.partition("full: 2\n")
    assert after, process.errors
    assert "no space left" in last_sentence(full).lower()
    assert ".part" not in after
    assert "after: 0" in after
    assert_same(subject, reference)


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
def test_a_read_only_disk_stops_a_run_that_can_be_resumed(
    setup: Setup, reference: Reference
) -> None:
    subject = setup.subject("read-only")
    killed_after(subject, 3)
    disk = setup.root / "read-only-disk"
    disk.mkdir()
    words = [str(disk), str(subject.run), sys.executable, "-m", "certvol", "adapt"]
    process = Process(["unshare", "-rm", "bash", "-c", READ_ONLY, "disk", *words], subject.cache)
    process.wait()
    refused, _, after = process.errors.partition("read-only: 2\n")
    assert after, process.errors
    assert "read-only file system" in last_sentence(refused).lower()
    assert "after: 0" in after
    assert_same(subject, reference)


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_an_unusable_checkpoint_folder_loses_nothing(
    alive: bool, setup: Setup, reference: Reference
) -> None:
    """A file in its place stands for any fault of writing: root ignores permissions."""
    subject = setup.subject(f"blocked-{alive}")
    folder, aside = subject.run / "checkpoint", subject.run.with_name(f"{subject.run.name}.aside")
    process = suspended_after(subject, 3)
    folder.rename(aside)
    folder.write_text("in the way")
    if alive:
        process.popen.send_signal(signal.SIGCONT)
    else:
        process.kill()
        process = subject.start()
    assert process.wait() == 2, process.errors
    assert "checkpoint" in last_sentence(process.errors)
    folder.unlink()
    aside.rename(folder)
    subject.finish()
    assert_same(subject, reference)


@pytest.mark.slow
def test_a_run_folder_that_disappears_is_not_made_again(setup: Setup, reference: Reference) -> None:
    """The disk it lies on may have been unmounted; the run resumes when it is back."""
    subject = setup.subject("gone")
    process = suspended_after(subject, 3)
    subject.run.rename(setup.root / "elsewhere")
    process.popen.send_signal(signal.SIGCONT)
    assert process.wait() == 2, process.errors
    assert str(subject.run) in last_sentence(process.errors)
    assert not subject.run.exists()
    (setup.root / "elsewhere").rename(subject.run)
    subject.finish()
    assert_same(subject, reference)


@pytest.mark.slow
def test_a_cache_cut_short_in_use_ends_the_process_but_not_the_run(
    setup: Setup, reference: Reference
) -> None:
    """The cache is mapped, so the system sends SIGBUS; the next process decodes again."""
    subject = setup.subject("cut-short")
    process = suspended_after(subject, 3)
    for pixels in subject.cache.glob("*/pixels.bin"):
        os.truncate(pixels, 0)
    process.popen.send_signal(signal.SIGCONT)
    assert process.wait() == -signal.SIGBUS
    assert "are damaged" in subject.finish().errors
    assert_same(subject, reference)
