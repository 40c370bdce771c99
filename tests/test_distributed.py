"""Two processes on the CPU, which torchrun starts as it does for a user, or forks in its place."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from certvol.cli._main import run
from certvol.distributed import Team
from chaos_runs import SIGNALLED
from support.commands import words_of
from support.images import tiny
from support.processes import Forked, Surroundings

# A batch split over processes is the same batch if nothing is random per process and there are no
# batch statistics.
SAME = tiny(
    model__norm="frozen",
    model__dropout=0.0,
    augment__enabled=False,
    training__batch_size=24,
    training__learning_rate=0.003,
)


def started_by_torchrun(*words: object) -> "subprocess.Popen[str]":
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "certvol", "adapt", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ended(process: "subprocess.Popen[str]") -> str:
    """Return what a failed team printed."""
    error = process.communicate(timeout=600)[1]
    assert process.returncode != 0, error
    return error


def team(place: Path, words: Sequence[object], code: int = 0, program: str = "") -> tuple[str, str]:
    """Run two forks with the environment that torchrun gives; return what they printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    out, error = str(place / "stdout"), str(place / "stderr")
    how = ["-c", program] if program else ["-m", "certvol"]
    processes = [
        Forked(
            [*how, "adapt", *map(str, words)],
            Surroundings({**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}, out, error),
        )
        for rank in "01"
    ]
    codes = [process.wait(600) for process in processes]
    said = Path(out).read_text(), Path(error).read_text()
    for printed in (out, error):
        Path(printed).unlink()
    assert codes == [code, code], said
    return said


def arguments(folders: tuple[Path, Path], out: Path, settings: dict[str, object]) -> list[object]:
    return ["--source", folders[0], "--target", folders[1], "--out", out, *words_of(settings)]


def adapt_alone(words: Sequence[object]) -> None:
    assert run(["adapt", *map(str, words)]) == 0


def wait_for_a_checkpoint(run: Path, other_than: str = "") -> str:
    """Return the content of `latest.json` once it is new."""
    latest, deadline = run / "checkpoint" / "latest.json", time.monotonic() + 600
    while time.monotonic() < deadline:
        if latest.exists() and (found := latest.read_text()) != other_than:
            return found
        time.sleep(0.05)
    raise AssertionError("no checkpoint")


def test_shares_are_whole_and_even() -> None:
    for count in (0, 1, 7, 8, 64):
        parts = [Team(rank, 3).share(count) for rank in range(3)]
        assert [i for part in parts for i in range(count)[part]] == list(range(count))
        assert (
            max(len(range(count)[p]) for p in parts) - min(len(range(count)[p]) for p in parts) <= 1
        )


def test_a_team_of_one_changes_nothing() -> None:
    team, rows = Team(), np.arange(3)
    assert team.main
    assert team.gather(rows) is rows
    tensor = torch.ones(2)
    team.average([tensor])
    assert tensor.tolist() == [1, 1]
    assert team.agree(None) is None
    assert team.agree(15) == 15
    team.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["cvp", "basic", "dann", "ufal", "self_ensembling", "mdd", "adr", "renyi"]
)
def test_two_processes_give_the_weights_of_one(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {**SAME, "method.name": method}
    if method == "dann":  # a network that pretraining leaves out
        settings |= {"method.discriminator_norm": False, "training.weight_decay": 0.1}
    if (
        method == "self_ensembling"
    ):  # balance over a share of the batch is another than over the whole
        settings |= {
            "method.balance_weight": 0.0,
            "method.threshold": 0.3,
            "method.teacher_decay": 0.5,
        }
    if method != "cvp":
        settings.pop("method.num_samples")
    adapt_alone(arguments(folders, tmp_path / "1", settings))
    out, _ = team(tmp_path, arguments(folders, tmp_path / "2", settings))
    assert out.count("predictions for every target image") == 1
    for name in ("pretrained.safetensors", "model.safetensors"):
        one, two = load_file(tmp_path / "1" / name), load_file(tmp_path / "2" / name)
        for key in one:
            assert torch.allclose(one[key], two[key], atol=1e-5), (name, key)
    moved = load_file(tmp_path / "1" / "model.safetensors")
    start_weights = load_file(tmp_path / "1" / "pretrained.safetensors")
    assert any((moved[key] - start_weights[key]).abs().max() > 1e-3 for key in moved)
    alone, both = ((tmp_path / n / "predictions.csv").read_text().splitlines() for n in "12")
    assert [line.split(",")[:2] for line in alone] == [line.split(",")[:2] for line in both]
    alone, both = ((tmp_path / n / "measures.csv").read_text().splitlines() for n in "12")
    for mine, theirs in zip(alone[1:], both[1:], strict=True):
        for cell, other in zip(mine.split(",")[3:], theirs.split(",")[3:], strict=True):
            assert cell == other == "" or abs(float(cell) - float(other)) < 1e-2, (mine, theirs)
    features, others = (load_file(tmp_path / n / "features.safetensors") for n in "12")
    assert features["indices"].tolist() == others["indices"].tolist()
    for key in ("pretrained", "adapted"):
        assert torch.allclose(features[key].float(), others[key].float(), atol=1e-2), key


@pytest.mark.slow
@pytest.mark.parametrize("method", ["can", "rsda_mstn", "shot", "atdoc", "aad"])
def test_two_processes_give_the_same_labels_of_the_whole_target(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Losses compare rows within a process's share, so weights differ; the first labels agree."""
    settings = {
        **SAME,
        "method.name": method,
        "training.teacher": 0.5,
        "training.checkpoint_seconds": 0,
    }
    settings.pop("method.num_samples")
    if method == "rsda_mstn":
        settings["method.rounds"] = 1
    labels = []
    # The second training labels the target again, by weights that have hardly moved.
    first_cycle = {**settings, "training.cycles": 1, "training.adapt_learning_rate": 1e-9}
    for processes in (1, 2):
        out = tmp_path / str(processes)
        words = arguments(folders, out, first_cycle)
        _ = adapt_alone(words) if processes == 1 else team(tmp_path, words)
        newest = json.loads((out / "checkpoint" / "latest.json").read_text())[0]
        labels.append(load_file(out / "checkpoint" / newest["file"])["labelled"])
    assert torch.equal(labels[0], labels[1])
    assert (labels[0] >= 0).sum() > 20
    team(tmp_path, arguments(folders, tmp_path / "whole", settings))
    assert (tmp_path / "whole" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mixed", "per_domain"])
def test_with_synchronised_norm_two_processes_have_the_statistics_of_one(
    mode: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {
        **SAME,
        "model.norm": mode,
        "training.pretrain_steps": 3,
        "training.cycles": 2,
        "training.cycle_steps": 2,
    }
    for processes, synchronised in ((1, False), (2, True), (2, False)):
        words = arguments(
            folders,
            tmp_path / f"{processes}{synchronised}",
            {**settings, "model.sync_norm": synchronised},
        )
        _ = adapt_alone(words) if processes == 1 else team(tmp_path, words)
    alone, together, apart = (
        load_file(tmp_path / name / "model.safetensors") for name in ("1False", "2True", "2False")
    )
    for key in alone:
        assert torch.allclose(alone[key], together[key], atol=1e-4), key
    assert any((alone[key] - apart[key]).abs().max() > 1e-3 for key in alone)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cvp", "mstn", "self_ensembling", "simnet"])
def test_a_stopped_team_ends_with_the_same_bytes_whenever_it_saves(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The methods keep nothing beside weights, centroids, prototypes and a teacher."""
    settings = tiny(
        method__name=method,
        model__norm="per_domain",
        training__cycles=2,
        training__log_every=1,
        training__checkpoint_seconds=0,
    )
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    stopping = SIGNALLED.format(method="save", calls=16, number=signal.SIGTERM.value)
    team(tmp_path, arguments(folders, parts, settings), 143, stopping)
    assert not (parts / "model.safetensors").exists()
    _, error = team(tmp_path, ["--resume", parts])
    assert "resuming from adapt" in error
    rarely = {**settings, "training.checkpoint_seconds": 1000}
    team(tmp_path, arguments(folders, whole, rarely))
    for name in ("model.safetensors", "predictions.csv"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_run_can_be_resumed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = tiny(training__pretrain_steps=4000, training__checkpoint_seconds=0)
    process = started_by_torchrun(*arguments(folders, out, settings))
    wait_for_a_checkpoint(out)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    error = ended(process)
    assert "Signal 9" in error or "SIGKILL" in error
    left = (out / "checkpoint" / "latest.json").read_text()
    second = started_by_torchrun("--resume", out)
    wait_for_a_checkpoint(out, other_than=left)
    second.send_signal(signal.SIGTERM)
    assert "resuming from pretrain" in ended(second)


@pytest.mark.slow
def test_a_mistake_ends_all_with_its_reason(folders: tuple[Path, Path], tmp_path: Path) -> None:
    words = arguments(folders, tmp_path / "run", {**SAME, "training.cyles": 3})
    assert "did you mean `training.cycles`?" in ended(started_by_torchrun(*words))
    assert not (tmp_path / "run").exists()
