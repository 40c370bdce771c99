"""Nothing executes: read from the source itself, and tried with files that would."""

import ast
import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import certvol
from certvol.errors import CertvolError, Interrupted, RunFailed, UserError
from certvol.report.records import read_record
from certvol.training.checkpoint import digest_of
from images import tiny, write_domain
from stop_at import StopAt

ROOT = Path(certvol.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
EXECUTING = {"pickle", "cPickle", "_pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal", "code", "runpy"}
# nn/weights.py names pickle's error, which torch raises for what it refuses; nothing of pickle is called.
ALLOWED = {("nn/weights.py", "pickle")}


def _calls() -> Iterator[tuple[str, ast.Call, str]]:
    """(file, call, its name with dots) of every call in the package."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, node, ast.unparse(node.func)


def _keyword(call: ast.Call, name: str) -> object:
    found = [word.value for word in call.keywords if word.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def test_nothing_that_unpickles_is_imported() -> None:
    found = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {(file, name.split(".")[0]) for name in names}
            found |= {(file, "joblib") for name in names if name.startswith(("sklearn.externals", "numpy.lib.format"))}
    assert {pair for pair in found if pair[1] in EXECUTING} <= ALLOWED


def test_of_pickle_only_its_error_is_used() -> None:
    for file, name in ALLOWED:
        used = {
            ast.unparse(n)
            for n in ast.walk(TREES[file])
            if isinstance(n, ast.Attribute) and ast.unparse(n.value) == name
        }
        assert used <= {"pickle.UnpicklingError"}, file


def test_torch_load_reads_weights_only() -> None:
    found = [
        (file, call) for file, call, name in _calls() if name in ("torch.load", "torch.jit.load", "torch.hub.load")
    ]
    assert found
    for file, call in found:
        assert ast.unparse(call.func) == "torch.load", file
        assert _keyword(call, "weights_only") is True, f"{file}:{call.lineno}"
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert "load" not in {alias.name for alias in node.names}, file


def test_numpy_never_unpickles() -> None:
    for file, call, name in _calls():
        if name.split(".")[-1] in ("load", "save", "savez", "savez_compressed") and name.split(".")[0] in (
            "np",
            "numpy",
        ):
            assert _keyword(call, "allow_pickle") is not True, f"{file}:{call.lineno}"
            assert all(word.arg is not None for word in call.keywords), f"{file}:{call.lineno}"


def test_yaml_is_loaded_safely() -> None:
    loads = {name for _, _, name in _calls() if name.startswith("yaml.")}
    assert not loads & {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
    assert "yaml.safe_load" in loads
    assert not [
        file
        for file, tree in TREES.items()
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module == "yaml"
    ]


def test_no_text_becomes_code_or_a_command() -> None:
    for file, call, name in _calls():
        where = f"{file}:{call.lineno}"
        assert name not in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"), where
        assert not name.startswith(("os.system", "os.popen", "os.exec", "os.spawn", "pty.")), where
        if name.startswith("subprocess."):
            assert _keyword(call, "shell") is not True, where
            assert name not in ("subprocess.getoutput", "subprocess.getstatusoutput"), where
            assert call.args, where
            assert isinstance(call.args[0], ast.List), f"{where}: a list of words, never a line for a shell"


def test_nothing_reaches_for_the_network_itself() -> None:
    network = {"socket", "urllib", "http", "requests", "ftplib", "httpx", "huggingface_hub", "smtplib"}
    for file, tree in TREES.items():
        if file in ("nn/backbones.py", "benchmark/cluster.py"):  # timm's hub, and what is given as --ray
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & network, file


# --- a run folder from a stranger


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one complete, one stopped amid adaptation."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CERTVOL_CACHE", str(root / "cache"))
        folders = write_domain(root / "source", per_class=6), write_domain(root / "target", per_class=6, seed=1)
        certvol.adapt(*folders, out=root / "complete", **tiny())
        with pytest.raises(Interrupted):
            certvol.adapt(*folders, out=root / "stopped", stop_signal=StopAt(15), **tiny())
    assert "plan.images_SN" in load_file(next((root / "stopped" / "checkpoint").glob("state-*.safetensors")))
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    for name in ("complete", "stopped"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_a_pickle_in_place_of_a_model_or_state_never_runs(kind: str, runs: Path) -> None:
    mark, evil = runs / "executed", runs / "evil"
    content = {"x": torch.ones(2), "extra": Payload(mark)}
    if kind == "plain pickle":
        evil.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, evil, _use_new_zipfile_serialization=kind == "zip")
    for name in ("model", "pretrained"):
        shutil.copy(evil, runs / "complete" / f"{name}.safetensors")
    with pytest.raises(UserError, match="damaged or no weights"):
        certvol.load(runs / "complete")
    with pytest.raises(UserError, match="damaged"):
        certvol.adapt(resume=runs / "complete")

    folder = runs / "stopped" / "checkpoint"
    pointer = folder / "latest.json"
    listed = json.loads(pointer.read_text())
    for entry in listed:
        shutil.copy(evil, folder / entry["file"])
    write_sealed(pointer, listed)
    with contextlib.suppress(CertvolError):
        certvol.adapt(resume=runs / "stopped")  # from the beginning, as no state can be used
    assert not mark.exists()


def test_a_pickle_in_place_of_the_cache_never_runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    shutil.copytree(made / "cache", tmp_path / "cache")
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    for file in [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]:
        file.write_bytes(pickle.dumps(Payload(mark)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("certvol.training.trainer.Trainer.fit", _no_training)
        with pytest.raises(RunFailed, match="far enough"):
            certvol.adapt(made / "source", made / "target", out=tmp_path / "run", **tiny())
    assert not mark.exists()


def write_sealed(pointer: Path, entries: list[dict[str, Any]]) -> None:
    """With the right checksums: a stranger can write those too."""
    for entry in entries:
        entry["blake2b"] = digest_of(pointer.parent / entry["file"], entry["facts"])
    pointer.write_text(json.dumps(entries))


def _no_training(_: object) -> None:
    raise RunFailed("far enough: the images are read")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"position": {}},
        {"position": None, "guard": None, "fingerprints": None, "journal": None, "trial_journal": None},
        {"position": {"phase": "nowhere", "cycle": "x"}, "guard": {}, "fingerprints": {}, "journal": {}},
        {"position": {"no_such_field": 1}},
    ],
)
def test_a_state_with_other_facts_is_refused_in_a_sentence(facts: dict[str, object], runs: Path) -> None:
    pointer = runs / "stopped" / "checkpoint" / "latest.json"
    write_sealed(pointer, [{**entry, "facts": facts} for entry in json.loads(pointer.read_text())])
    with pytest.raises(CertvolError):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize("name", ["trial", "mode"])
def test_a_position_never_leads_outside_the_run(name: str, runs: Path) -> None:
    """The mode on trial is part of a path."""
    outside = runs / "outside"
    outside.mkdir()
    (outside / "history.jsonl").write_text("precious\n")
    (runs / "stopped" / "cycles" / "trial-").mkdir(parents=True)
    pointer = runs / "stopped" / "checkpoint" / "latest.json"
    listed = json.loads(pointer.read_text())
    for entry in listed:
        entry["facts"]["position"][name] = "/../../../outside"
    write_sealed(pointer, listed)
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
        "model.safetensors.part",
        "predictions.csv.part",
        "environment.json.part",
        "checkpoint/latest.json.part",
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
def test_a_folder_of_a_run_that_is_a_link_is_not_written_through(name: str, runs: Path) -> None:
    (runs / "stopped" / name).rename(runs / "away")
    (runs / "stopped" / name).symlink_to(runs / "away")
    before = {path: path.read_bytes() for path in (runs / "away").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="link"):
        certvol.adapt(resume=runs / "stopped")
    assert {path: path.read_bytes() for path in (runs / "away").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tensors: {}, id="nothing"),
        pytest.param(lambda tensors: {name: torch.zeros(3) for name in tensors}, id="other shapes"),
        pytest.param(lambda tensors: tensors | {"optimizer.9999.x": torch.zeros(1)}, id="unknown parameter"),
        pytest.param(lambda tensors: tensors | {"optimizer.x.y": torch.zeros(1)}, id="no number"),
        pytest.param(lambda tensors: tensors | {"plan.other": torch.zeros(1)}, id="unknown plan"),
        pytest.param(
            lambda tensors: {name: t + 10**6 if name == "plan.images_SN" else t for name, t in tensors.items()},
            id="images that are not there",
        ),
    ],
)
def test_a_state_with_other_tensors_is_refused_in_a_sentence(change: Callable[..., Any], runs: Path) -> None:
    folder = runs / "stopped" / "checkpoint"
    listed = json.loads((folder / "latest.json").read_text())
    for entry in listed:
        file = folder / entry["file"]
        save_file({k: v.clone() for k, v in change(load_file(file)).items()}, file)
    write_sealed(folder / "latest.json", listed)
    with pytest.raises(CertvolError):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize(
    "facts",
    [
        {"journal": {"history.jsonl": -5}},
        {"journal": {"history.jsonl": "all"}},
        {"trial_journal": 5},
        {"position": {"phase": "trial", "trial_scores": {"mixed": "best", "per_domain": None}}},
    ],
)
def test_a_state_with_impossible_facts_is_refused_in_a_sentence(facts: dict[str, Any], runs: Path) -> None:
    pointer = runs / "stopped" / "checkpoint" / "latest.json"
    listed = json.loads(pointer.read_text())
    for entry in listed:
        entry["facts"].update(facts)
    write_sealed(pointer, listed)
    with pytest.raises(RunFailed, match="not one of this run"):
        certvol.adapt(resume=runs / "stopped")


@pytest.mark.parametrize("text", ["[]", '{"resumed": 5}', "3"])
def test_an_environment_that_is_none_does_not_keep_a_run_from_going_on(text: str, runs: Path) -> None:
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
        pytest.param({"classes": 3, "norm": "mixed"}),
        pytest.param({"classes": None, "norm": "mixed"}),
        pytest.param({"classes": [1, 2, {}], "norm": "mixed"}),
        pytest.param({"classes": "abc", "norm": "mixed"}),
        pytest.param({"classes": ["a", "b", "c"], "norm": "no such mode"}),
        pytest.param({"classes": ["a", "b", "c"], "norm": ["mixed"]}),
        {"classes": ["a", "b"], "norm": "mixed"},
        {},
        [],
        3,
    ],
)
def test_a_model_that_says_other_things_about_itself_is_refused_in_a_sentence(about: object, runs: Path) -> None:
    file = runs / "complete" / "model.safetensors"
    save_file(load_file(file), file, {"certvol": json.dumps(about)})
    with pytest.raises(CertvolError):
        certvol.load(runs / "complete")


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.mkdir ['{mark}']", "!!python/name:os.system", "{{", "[]", "3: 4"]
)
def test_a_run_whose_settings_are_no_settings_is_refused(text: str, runs: Path) -> None:
    (runs / "complete" / "config.yaml").write_text(text.format(mark=runs / "executed"))
    with pytest.raises(UserError):
        certvol.load(runs / "complete")
    assert not (runs / "executed").exists()


def test_weights_named_in_the_settings_of_a_run_are_not_read_to_predict(runs: Path) -> None:
    """A run that is loaded brings its own weights: no other file, and no download."""
    config = runs / "complete" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["model"]["weights"] = "/dev/zero"
    config.write_text(yaml.safe_dump(settings))
    assert certvol.load(runs / "complete").classes == ["apple", "leaf", "sky"]


@pytest.mark.parametrize(
    "content",
    [
        *(content for content in ("[]", "3", '{"source_only": 1}', "{}", "[" * 100_000)),
        "\ud800",
    ],
    ids=["list", "number", "other figures", "nothing", "deep", "no UTF-8"],
)
def test_figures_of_a_stranger_are_shown_or_refused(
    content: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from certvol.cli import run

    (runs / "complete" / "metrics.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert run(["adapt", "--resume", str(runs / "complete")]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "path,label\n", "path,label,probability,sigma\na,b,c,d\n", 'path,sigma\n"x\n', "\0"]
)
def test_predictions_of_a_stranger_give_a_threshold_or_a_sentence(
    content: str, runs: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from certvol.cli import run

    (runs / "complete" / "predictions.csv").write_text(content)
    words = ["predict", str(runs / "complete"), str(made / "target"), "--out", str(runs / "p.csv"), "--coverage", "0.5"]
    assert run(words) == 2
    assert "Traceback" not in capsys.readouterr().err
