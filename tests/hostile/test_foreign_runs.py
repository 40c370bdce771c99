"""A run folder from a stranger: odd files in it are refused, and nothing outside it is touched."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import certvol
from certvol.cli._main import run
from certvol.errors import CertvolError, RunFailed, UserError
from certvol.report.records import read_record
from certvol.runs.checkpoint import write_tensors
from support.commands import refused
from support.sealed import reseal


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"position": {}},
        dict.fromkeys(["position", "choice", "fingerprints", "journal", "trial_journal"]),
        {"position": {"phase": "nowhere", "cycle": "x"}, "choice": {}, "journal": {}},
        {"position": {"no_such_field": 1}},
    ],
)
def test_a_checkpoint_with_other_facts_is_refused(facts: dict[str, object], runs: Path) -> None:
    reseal(runs / "stopped" / "checkpoint", lambda entry: entry.update(facts=facts))
    with pytest.raises(CertvolError):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize("name", ["trial", "mode"])
def test_a_position_cannot_lead_out_of_the_run(name: str, runs: Path) -> None:
    """The norm mode of a trial is part of a path."""
    outside = runs / "outside"
    outside.mkdir()
    (outside / "history.jsonl").write_text("precious\n")
    (runs / "stopped" / "cycles" / "trial-").mkdir(parents=True)

    def lead_away(entry: dict[str, Any]) -> None:
        entry["facts"]["position"][name] = "/../../../outside"

    reseal(runs / "stopped" / "checkpoint", lead_away)
    with pytest.raises(CertvolError):
        certvol.adapt(resume=runs / "stopped")
    assert (outside / "history.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "history.jsonl",
        "timing.jsonl",
        "cycles/scores.jsonl",
        "model.safetensors.0123abcd.part",
        "environment.json",
        "checkpoint/latest.json",
    ],
)
def test_a_link_in_a_run_is_not_written_through(name: str, runs: Path) -> None:
    precious, link = runs / "precious", runs / "stopped" / name
    precious.write_text("precious\n")
    link.unlink(missing_ok=True)
    link.symlink_to(precious)
    with contextlib.suppress(CertvolError):
        certvol.adapt(resume=runs / "stopped")
    assert precious.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["cycles", "checkpoint"])
def test_a_linked_folder_in_a_run_is_not_written_through(name: str, runs: Path) -> None:
    (runs / "stopped" / name).rename(runs / "away")
    (runs / "stopped" / name).symlink_to(runs / "away")
    before = {path: path.read_bytes() for path in (runs / "away").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="link"):
        certvol.adapt(resume=runs / "stopped")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(before) == sum(path.is_file() for path in (runs / "away").rglob("*"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tensors: {}, id="nothing"),
        pytest.param(lambda tensors: {name: torch.zeros(3) for name in tensors}, id="other shapes"),
        pytest.param(
            lambda tensors: tensors | {"optimizer.9999.x": torch.zeros(1)}, id="unknown parameter"
        ),
        pytest.param(lambda tensors: tensors | {"optimizer.x.y": torch.zeros(1)}, id="no number"),
        pytest.param(lambda tensors: tensors | {"plan.other": torch.zeros(1)}, id="unknown plan"),
        pytest.param(
            lambda tensors: {
                name: t + 10**6 if name == "plan.images_SN" else t for name, t in tensors.items()
            },
            id="images that are not there",
        ),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused(change: Callable[..., Any], runs: Path) -> None:
    for file in (runs / "stopped" / "checkpoint").glob("state-*.safetensors"):
        write_tensors(file, change(load_file(file)))
    reseal(runs / "stopped" / "checkpoint")
    with pytest.raises(CertvolError):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize(
    "facts",
    [
        {"journal": {"history.jsonl": -5}},
        {"journal": {"history.jsonl": "all"}},
        {"trial_journal": 5},
        {"position": {"phase": "trial", "trial_scores": {"mixed": "best", "per_domain": None}}},
        {"position": {"phase": "trial", "trial_scores": {"mixed": {"entropy": "low"}}}},
    ],
)
def test_a_checkpoint_with_impossible_facts_is_refused(facts: dict[str, Any], runs: Path) -> None:
    reseal(runs / "stopped" / "checkpoint", lambda entry: entry["facts"].update(facts))
    with pytest.raises(RunFailed, match="not one of this run"):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize("text", ["[]", '{"resumed": 5}', "3"])
def test_a_run_with_an_invalid_environment_file_can_be_resumed(text: str, runs: Path) -> None:
    place = runs / "stopped" / "environment.json"
    place.write_text(text)
    certvol.adapt(resume=runs / "stopped")
    assert len(json.loads(place.read_text())["resumed"]) == 1


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "metrics.json"])
def test_a_named_pipe_in_a_run_is_not_waited_for(name: str, runs: Path) -> None:
    file = runs / "complete" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for use in (certvol.load, read_record, lambda run: certvol.adapt(resume=run)):
        with pytest.raises(UserError, match="named pipe"):
            use(runs / "complete")


def test_a_model_is_not_read_through_a_link_out_of_its_run(runs: Path) -> None:
    file = runs / "complete" / "model.safetensors"
    file.rename(runs / "elsewhere.safetensors")
    file.symlink_to(runs / "elsewhere.safetensors")
    with pytest.raises(UserError, match="link that leads out"):
        certvol.load(runs / "complete")


@pytest.mark.parametrize(
    "about",
    [
        {"classes": 3, "norm": "mixed"},
        {"classes": None, "norm": "mixed"},
        {"classes": [1, 2, {}], "norm": "mixed"},
        {"classes": "abc", "norm": "mixed"},
        {"classes": ["a", "b", "c"], "norm": "no such mode"},
        {"classes": ["a", "b", "c"], "norm": ["mixed"]},
        {"classes": ["a", "b"], "norm": "mixed"},
        {},
        [],
        3,
    ],
)
def test_a_model_with_invalid_metadata_is_refused(about: object, runs: Path) -> None:
    file = runs / "complete" / "model.safetensors"
    tensors = load_file(file)
    if isinstance(about, dict):
        write_tensors(file, tensors, about)
    else:
        save_file(tensors, file, {"certvol": json.dumps(about)})
    with pytest.raises(CertvolError):
        certvol.load(runs / "complete")


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.mkdir ['{mark}']", "!!python/name:os.system", "{{", "[]", "3: 4"],
)
def test_a_run_with_invalid_settings_is_refused(text: str, runs: Path) -> None:
    (runs / "complete" / "config.yaml").write_text(text.format(mark=runs / "executed"))
    with pytest.raises(UserError):
        certvol.load(runs / "complete")
    assert not (runs / "executed").exists()


def test_predicting_reads_no_weights_but_the_runs_own(runs: Path) -> None:
    """A file that the settings name is neither read nor downloaded."""
    config = runs / "complete" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["model"]["weights"] = "/dev/zero"
    config.write_text(yaml.safe_dump(settings))
    assert certvol.load(runs / "complete").classes == ["apple", "leaf", "sky"]


@pytest.mark.parametrize(
    "content",
    ["[]", "3", '{"source_only": 1}', "{}", "[" * 100_000, "\ud800"],
    ids=["list", "number", "other figures", "empty", "deep", "not UTF-8"],
)
def test_a_changed_metrics_file_is_shown_or_refused(
    content: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "complete" / "metrics.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert run(["adapt", "--resume", str(runs / "complete")]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "path,label\n", "path,label,probability,sigma\na,b,c,d\n", 'path,sigma\n"x\n', "\0"],
)
def test_a_changed_predictions_file_is_refused_as_a_threshold(
    content: str, runs: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "complete" / "predictions.csv").write_text(content)
    words = ["predict", str(runs / "complete"), str(made / "target"), "--measure", "sigma"]
    refused(capsys, *words, "--out", str(runs / "p.csv"), "--coverage", "0.5")
