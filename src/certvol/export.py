"""A run's model as one file that needs no certvol: ONNX, or a program of torch.export.

Input `images`: uint8, N x S x S x 3, RGB, any N; S is `input_size`. An image is squashed to S x S (Pillow: `resize((S, S),
BILINEAR)`); the crop of its centre and the normalisation are part of the model. Output `logits` (N x C) and, for a method that
has it, `sigma` (N). What goes with it is in the file's metadata, each value as JSON: `labels`, `input_size`, `outputs`,
`thresholds` (measure -> coverage -> value, of those measures that follow from the outputs), `method`, `backbone`, `format`.

Of a run on files of features the input is `features`: float32, N x D; `input_size` is then D, and `input` says which it is.

Neither file holds a pickle: ONNX is a protobuf, and a `.pt2` holds JSON and raw bytes. But torch's reader of `.pt2` would run a
pickle that somebody has put into one: a file from a stranger is safe as ONNX only.
"""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from certvol.data.augment import cache_size
from certvol.errors import RunFailed, UserError
from certvol.methods.protocol import AdaptationMethod
from certvol.model import Model, load
from certvol.nn.backbones import features_dim
from certvol.nn.norm import TARGET
from certvol.outputs import check_output
from certvol.training.checkpoint import FORMAT, write_atomically
from certvol.training.run_folder import RunFolder

Format = Literal["onnx", "torch"]
FORMATS: tuple[Format, ...] = ("onnx", "torch")
METADATA_FILE = "certvol.json"  # inside a .pt2
FROM_OUTPUTS = ("probability", "entropy", "sigma", "logit", "logit_diff")
MOST_DIFFERENCE = 1e-3  # between the file and the model, of a logit or sigma


class ExportedHead(nn.Module):
    """Features to logits and sigma, with the target's statistics."""

    def __init__(self, method: AdaptationMethod) -> None:
        super().__init__()
        self.method = method
        method.network.domains.num_source, method.network.domains.whole_batch = None, TARGET

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        features_ND = self.method.network.features(inputs)
        logits_NC, sigma_N = self.method.logits(features_ND), self.method.sigma(features_ND)
        return (logits_NC,) if sigma_N is None else (logits_NC, sigma_N)


class Exported(ExportedHead):
    """uint8 images to logits and sigma."""

    mean_3: Tensor
    std_3: Tensor

    def __init__(self, method: AdaptationMethod) -> None:
        super().__init__(method)
        info = method.network.info
        self.size, self.start = info.image_size, (cache_size(info.image_size) - info.image_size) // 2
        self.register_buffer("mean_3", 255 * torch.tensor(info.mean))
        self.register_buffer("std_3", 255 * torch.tensor(info.std))

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        inside = slice(self.start, self.start + self.size)
        view_NHW3 = (inputs[:, inside, inside].float() - self.mean_3) / self.std_3
        return super().forward(view_NHW3.permute(0, 3, 1, 2).contiguous())


def export(run: str | Path, out: str | Path, format: Format = "onnx") -> dict[str, Any]:
    """Writes the file and returns its metadata, with `difference`: the largest between the file's outputs and the model's."""
    if format not in FORMATS:
        raise UserError(f"there is no format `{format}` (formats: {', '.join(FORMATS)})")
    if format == "onnx":
        _need_onnx()
    check_output(out)
    model = load(run, "cpu")
    metadata = describe(run, model)
    module = (Exported if metadata["input"] == "images" else ExportedHead)(model.method).eval()
    content = _onnx(module, metadata) if format == "onnx" else _torch(module, metadata)
    difference = _difference(content, format, module, metadata)
    if not difference <= MOST_DIFFERENCE:
        raise RunFailed(
            f"{model.info.name} as {format} gives other figures than the model (by {difference:.2g}), so nothing was written; "
            f"try --format {'torch' if format == 'onnx' else 'onnx'}"
        )
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(out), content)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    return {**metadata, "difference": difference}


def describe(run: str | Path, model: Model) -> dict[str, Any]:
    of_features = features_dim(model.info.name) is not None
    return {
        "format": FORMAT,
        "labels": model.classes,
        "input": "features" if of_features else "images",
        "input_size": model.info.dim if of_features else cache_size(model.info.image_size),
        "outputs": ["logits", "sigma"] if model.has_sigma else ["logits"],
        "thresholds": _thresholds(RunFolder(run).evaluation),
        "method": model.config.method_name,
        "backbone": model.info.name,
    }


def _thresholds(evaluation: Path) -> dict[str, dict[str, float]]:
    """As the run has stored them; none where it has not."""
    try:
        stored = json.loads(evaluation.read_text(encoding="utf-8"))["thresholds"]
        return {
            name: {str(share): float(value) for share, value in stored[name].items()}
            for name in FROM_OUTPUTS
            if name in stored
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{evaluation} is damaged or none of a run: {error}") from None


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--format onnx needs the package {error.name}: install certvol with its extra, `pip install 'certvol[onnx]'`"
        ) from None


def _examples(metadata: dict[str, Any], count: int) -> Tensor:
    side, generator = metadata["input_size"], torch.Generator().manual_seed(0)
    if metadata["input"] == "features":
        return torch.randn(count, side, generator=generator)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


def _program(module: ExportedHead, metadata: dict[str, Any]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            return torch.export.export(module, (_examples(metadata, 2),), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch has no common type for what it cannot export
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"{metadata['method']} on {metadata['backbone']} cannot be exported: torch finds no fixed program in it ({reason}); "
            "`certvol predict` and `certvol.load` do without"
        ) from None


def _torch(module: ExportedHead, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with _quiet():
        program = _program(module, metadata)
        program.example_inputs = None  # they would be the one pickle in the file
        torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(metadata)})
    return buffer.getvalue()


def _onnx(module: ExportedHead, metadata: dict[str, Any]) -> bytes:
    with _quiet():
        program = torch.onnx.export(
            _program(module, metadata),
            dynamo=True,
            input_names=[metadata["input"]],
            output_names=metadata["outputs"],
            optimize=True,
        )
    if program is None:
        raise AssertionError("an export into memory gives a program")
    proto = program.model_proto
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value)
    try:
        return bytes(proto.SerializeToString())
    except ValueError:  # protobuf's limit of 2 GB
        raise UserError("this model is too large for one ONNX file; use --format torch") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters talk about their own steps: nothing that a user could act on."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _difference(content: bytes, format: Format, module: ExportedHead, metadata: dict[str, Any]) -> float:
    """On random images, of another number than the export has seen."""
    images = _examples(metadata, 3)
    with torch.inference_mode():
        expected = [tensor.numpy() for tensor in module(images)]
    found = _run_onnx(content, metadata["input"], images) if format == "onnx" else _run_torch(content, images)
    return max(float(np.abs(one - other).max()) for one, other in zip(expected, found, strict=True))


def _run_onnx(content: bytes, name: str, images: Tensor) -> list[NDArray[np.float32]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: images.numpy()}))


def _run_torch(content: bytes, images: Tensor) -> list[NDArray[np.float32]]:
    with _quiet():
        program = torch.export.load(io.BytesIO(content)).module()
    with torch.inference_mode():
        return [tensor.numpy() for tensor in program(images)]
