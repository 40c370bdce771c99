"""Exported models give the same outputs without certvol."""

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import certvol
from certvol.cli import discover
from certvol.cli._main import run as cli
from certvol.cli._options import build_parser
from certvol.data.augment import cache_size
from certvol.methods import cvp
from certvol.nn.network import Network, seeded_backbone
from certvol.predict import export
from certvol.predict.export_formats import FORMATS, METADATA_FILE, Exporter
from certvol.predict.model import Model
from certvol.settings import Config, ModelConfig
from support.images import tiny

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "export.md"
SIDE = 10  # of the squashed image, for a network of 8 pixels


@pytest.fixture(scope="module")
def onnx_file(root: Path) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = root / "m" / "model.onnx"
    assert cli(["export", str(root / "run"), "--format", "onnx", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def torch_file(root: Path) -> Path:
    out = root / "m" / "model.pt2"
    assert cli(["export", str(root / "run"), "--format", "torch", "--out", str(out)]) == 0
    return out


def images(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def expected(
    root: Path, pixels: NDArray[np.uint8]
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """What the run's own model predicts: probabilities and sigma."""
    found = certvol.load(root / "run").predict([Image.fromarray(image) for image in pixels])
    return found.probabilities, found.sigma


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(logits).softmax(dim=1).numpy()


def check_metadata(about: dict[str, Any], root: Path) -> None:
    stored = json.loads((root / "run" / "evaluation.json").read_text())["thresholds"]
    assert about["labels"] == ["apple", "leaf", "sky"]
    assert about["input_size"] == SIDE
    assert about["outputs"] == ["logits", "sigma"]
    assert about["method"] == "cvp"
    assert about["thresholds"] == {name: stored[name] for name in export.FROM_OUTPUTS}


def test_onnx_gives_the_outputs_of_the_model(root: Path, onnx_file: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    for count in (1, 2, 7):
        logits, sigma = session.run(["logits", "sigma"], {"images": images(count)})
        probabilities, expected_sigma = expected(root, images(count))
        assert logits.shape == (count, 3)
        assert softmax(logits) == pytest.approx(probabilities, abs=1e-4)
        assert sigma == pytest.approx(expected_sigma, abs=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    check_metadata({key: json.loads(value) for key, value in metadata.items()}, root)


def test_torch_gives_the_outputs_of_the_model(root: Path, torch_file: Path) -> None:
    metadata = {METADATA_FILE: ""}
    program = torch.export.load(torch_file, extra_files=metadata).module()
    for count in (1, 2, 7):
        logits, sigma = program(torch.from_numpy(images(count)))
        probabilities, expected_sigma = expected(root, images(count))
        assert softmax(logits.detach().numpy()) == pytest.approx(probabilities, abs=1e-4)
        assert sigma.detach().numpy() == pytest.approx(expected_sigma, abs=1e-4)
    check_metadata(json.loads(metadata[METADATA_FILE]), root)


def test_a_torch_file_holds_no_pickle(torch_file: Path) -> None:
    with zipfile.ZipFile(torch_file) as archive:
        for entry in archive.infolist():
            content = archive.read(entry)
            assert not zipfile.is_zipfile(io.BytesIO(content)), (
                f"{entry.filename}: a torch.save inside"
            )
            assert (
                not re.match(rb"\x80[\x02-\x05]", content) or "/weights/weight_" in entry.filename
            ), entry.filename
            assert not entry.filename.endswith(".pkl")
        assert archive.read("archive/data/sample_inputs/model.pt") == b""
        raw = json.loads(archive.read("archive/data/weights/model_weights_config.json"))
    assert all(not each["use_pickle"] for each in raw["config"].values())


def test_a_method_without_sigma_is_exported_with_logits_only(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli(["export", str(root / "basic"), "--format", "torch", "--out", str(tmp_path / "m.pt2")])
        == 0
    )
    printed = capsys.readouterr().out
    assert "output: logits, 3 classes" in printed
    metadata = {METADATA_FILE: ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=metadata).module()
    (logits,) = program(torch.from_numpy(images(3)))
    assert logits.shape == (3, 3)
    about = json.loads(metadata[METADATA_FILE])
    assert about["outputs"] == ["logits"]
    assert set(about["thresholds"]) == {"probability", "entropy", "logit", "logit_diff"}


def test_the_snippet_of_the_guide_works_without_certvol(
    root: Path, onnx_file: Path, tmp_path: Path
) -> None:
    """The snippet as it stands there, in a process of its own."""
    (snippet,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        if "onnxruntime" in block
    )
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 20
    image = root / "target" / "leaf" / "3.png"
    (tmp_path / "model.onnx").write_bytes(onnx_file.read_bytes())
    (tmp_path / "image.png").write_bytes(image.read_bytes())
    code = snippet + "\nimport sys; assert not {'certvol', 'torch'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = certvol.load(root / "run").predict(image)
    assert found.sigma is not None
    label, sigma, *_ = done.stdout.split()
    assert label == found.labels[0]
    assert float(sigma) == pytest.approx(float(found.sigma[0]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "mode"), [("resnet18", "dsbn"), ("vit_tiny_patch16_224", "mixed")]
)
def test_backbones_of_timm_are_exported(backbone: str, mode: str) -> None:
    pytest.importorskip("onnxscript")
    config = ModelConfig(backbone=backbone, weights="none", norm=mode)  # type: ignore[arg-type]
    module, info = seeded_backbone(config, None, 0)
    method = cvp.Method(Network(module, info, 5, config), cvp.Method.Config()).eval()
    settings = Config(method_name="cvp", method=method.config, model=config)
    model = Model(method, list("abcde"), settings, torch.device("cpu"))
    exported = export.Exported(method).eval()
    size, outputs = cache_size(info.image_size), ["logits", "sigma"]
    metadata = {
        "input": "images",
        "input_size": size,
        "outputs": outputs,
        "method": "cvp",
        "backbone": backbone,
    }
    program = export._program(exported, metadata)
    for exporter in FORMATS.values():
        content = exporter.write(program, metadata)
        assert export._difference(content, exporter, model, metadata) < 1e-4


def test_export_uses_the_statistics_of_the_target(root: Path) -> None:
    model = certvol.load(root / "run")
    method = model.method
    module = export.Exported(method, model.temperature).eval()
    pixels = torch.from_numpy(images(4))
    with torch.no_grad():
        of_target = module(pixels)[0]
        method.network.domains.whole_batch = 0
        of_source = module(pixels)[0]
    assert softmax(of_target.numpy()) == pytest.approx(expected(root, images(4))[0], abs=1e-4)
    assert not torch.allclose(of_target, of_source, atol=1e-2)


def test_a_file_that_differs_is_not_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FORMATS, "torch", replace(FORMATS["torch"], write=lambda *_: b""))
    for difference in (0.1, float("nan")):
        monkeypatch.setattr(export, "_difference", lambda *_, by=difference: by)
        assert (
            cli(
                ["export", str(root / "run"), "--format", "torch", "--out", str(tmp_path / "m.pt2")]
            )
            == 1
        )
        assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["views", "temperature", "features"])
def test_a_wrong_wrapper_of_the_model_is_noticed(
    wrong: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = root / "run"
    if wrong == "views":
        normalise = export.Exported.forward
        monkeypatch.setattr(
            export.Exported, "forward", lambda self, inputs: normalise(self, inputs.flip(3))
        )
    elif wrong == "temperature":
        monkeypatch.setattr(export.ExportedHead, "__init__", _hot(export.ExportedHead.__init__))
    else:
        run = _fitted_run("jda", tmp_path)[0].path
        head = export.ExportedHead.forward
        monkeypatch.setattr(
            export.ExportedHead, "forward", lambda self, inputs: head(self, -inputs)
        )
    with pytest.raises(certvol.errors.RunFailed, match="differs from the model by"):
        export.export(run, tmp_path / "m.pt2", "torch")
    assert not (tmp_path / "m.pt2").exists()


def _hot(initialise: Callable[..., None]) -> Callable[..., None]:
    def changed(self: export.ExportedHead, method: Any, temperature: float) -> None:
        initialise(self, method, 2 * temperature)

    return changed


def test_a_new_format_is_one_entry_and_is_written_as_itself(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_format = FORMATS["torch"]
    new = Exporter(
        "torch's file behind a letter",
        write=lambda *given: b"X" + torch_format.write(*given),
        run=lambda content, inputs: torch_format.run(content[1:], inputs),
    )
    monkeypatch.setitem(FORMATS, "lettered", new)
    words = ["export", str(root / "run"), "--format", "lettered", "--out", str(tmp_path / "m")]
    assert cli(words) == 0
    assert (tmp_path / "m").read_bytes()[:1] == b"X"
    assert "lettered (torch's file behind a letter)" in _help()


def _help() -> str:
    _, commands = build_parser(discover())
    return " ".join(commands["export"].format_help().split())


def test_mistakes_are_explained_in_one_sentence(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "m")

    def refused(*words: str) -> str:
        assert cli(["export", *words]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    assert "unknown format `tflite`" in refused(
        str(root / "run"), "--format", "tflite", "--out", out
    )
    other = tmp_path / "model.ONNX"
    other.write_bytes(b"an earlier export")
    said = refused(str(root / "run"), "--format", "torch", "--out", str(other))
    assert "names a file of --format onnx; end its name in .pt2" in said
    assert other.read_bytes() == b"an earlier export"
    assert "holds no run" in refused("nowhere", "--format", "torch", "--out", out)
    assert "--out" in refused(str(root / "run"), "--format", "torch")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "certvol[onnx]" in refused(str(root / "run"), "--format", "onnx", "--out", out)
    assert not Path(out).exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"thresholds": {"sigma": 3}}', '{"thresholds": {"sigma": {"1": "x"}}}'],
)
def test_damaged_thresholds_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(certvol.errors.UserError, match="damaged"):
        export._thresholds(tmp_path / "evaluation.json")
    assert export._thresholds(tmp_path / "none.json") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "formats"),
    [
        ("jda", tuple(FORMATS)),
        *((method, ("onnx",)) for method in ("gtda", "rwa", "prda")),
        *((method, ("torch",)) for method in ("coral", "adrem")),
    ],
)
def test_a_fitted_head_is_exported(method: str, formats: tuple[str, ...], tmp_path: Path) -> None:
    """Above 25 rows torch computes distances, of stored rows too, differently."""
    run, rows = _fitted_run(method, tmp_path)
    model = run.model()
    for name in formats:
        if name == "onnx":
            pytest.importorskip("onnxscript")
        exporter = FORMATS[name]
        export.export(tmp_path / "run", tmp_path / "model", name)
        content = (tmp_path / "model").read_bytes()
        for count in (1, 3, 30):
            inputs = rows[:count] + np.float32(0.3)
            (logits,) = exporter.run(content, torch.from_numpy(inputs))
            predicted = model.predict(inputs).probabilities
            assert softmax(logits) == pytest.approx(predicted, abs=1e-4)


def _fitted_run(method: str, tmp_path: Path) -> tuple[certvol.Run, NDArray[np.float32]]:
    """Return a run on features by a method in closed form, and its source's rows."""
    draw, labels = np.random.default_rng(0), np.repeat(["a", "b", "c"], 12)
    rows = (4 * np.eye(3, 5)[np.arange(36) // 12] + draw.normal(size=(36, 5))).astype(np.float32)
    np.savez(tmp_path / "source.npz", features=rows, labels=labels)
    np.savez(tmp_path / "target.npz", features=rows[:30] + 0.3)
    files = (tmp_path / "source.npz", tmp_path / "target.npz")
    settings = tiny(method__name=method, model__backbone="features-5")
    return certvol.adapt(*files, out=tmp_path / "run", **settings), rows
