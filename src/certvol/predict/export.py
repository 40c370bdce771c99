"""Export a run's model to one file that needs no certvol: ONNX, or a torch.export program.

The input `images` is uint8, N x S x S x 3, RGB, for any N; S is `input_size`. Squash an image to
S x S (Pillow: `resize((S, S), BILINEAR)`); the model crops the centre (with `data.view_set
shifted`, several places) and normalises. For a run on files of features the input is `features`
instead: float32, N x D, with D as `input_size`. Outputs are `logits` (N x C), whose softmax is the
run's probabilities, and, if the method has it, `sigma` (N). The file's metadata, as JSON values:
`labels`, `input`, `input_size`, `outputs`, `thresholds` (measure -> coverage -> value, for measures
that follow from the outputs), `method`, `backbone`, `format`.

Neither file holds a pickle. But torch's reader of `.pt2` would run a pickle that somebody added to
one, so accept only ONNX files from strangers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from certvol.data.augment import cache_size, crops_at_shifts
from certvol.data.folders import printable
from certvol.errors import RunFailed, UserError, first_line
from certvol.methods._base import AdaptationMethod
from certvol.nn.backbones import features_dim
from certvol.nn.norm import TARGET
from certvol.predict.export_formats import FORMATS, Exporter, quiet
from certvol.predict.forward import run_batches
from certvol.predict.model import Model, load
from certvol.runs.checkpoint import FORMAT, damage_explained
from certvol.runs.folder import RunFolder
from certvol.runs.outputs import check_output, write_output
from certvol.scores.uncertainty import FROM_LOGITS

FROM_OUTPUTS = ("sigma", *FROM_LOGITS)
LARGEST_DIFFERENCE = 1e-3  # allowed between the file and the model, in logits and sigma


class ExportedHead(nn.Module):
    """Map features to logits and sigma, normalised by the target's statistics."""

    def __init__(self, method: AdaptationMethod, temperature: float = 1.0) -> None:
        super().__init__()
        self.method, self.temperature = method, temperature
        method.network.domains.num_source, method.network.domains.whole_batch = None, TARGET

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        features_ND = self.method.network.features(inputs)
        logits_NC, sigma_N = self.method.decide(features_ND), self.method.sigma(features_ND)
        logits_NC = logits_NC / self.temperature
        return (logits_NC,) if sigma_N is None else (logits_NC, sigma_N)


class Exported(ExportedHead):
    """Map uint8 images to logits and sigma."""

    mean_3: Tensor
    std_3: Tensor

    def __init__(self, method: AdaptationMethod, temperature: float = 1.0) -> None:
        super().__init__(method, temperature)
        info = method.network.info
        self.start = (cache_size(info.image_size) - info.image_size) // 2
        self.stop = self.start + info.image_size
        self.register_buffer("mean_3", 255 * torch.tensor(info.mean))
        self.register_buffer("std_3", 255 * torch.tensor(info.std))

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        inside = slice(self.start, self.stop)
        crop_NHW3 = inputs[:, inside, inside].float()
        view_NHW3 = (crop_NHW3 - self.mean_3) / self.std_3
        return super().forward(view_NHW3.permute(0, 3, 1, 2).contiguous())


class ExportedShifted(Exported):
    """Map uint8 images to logits and sigma by the mean features of shifted and mirrored crops."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        crops = torch.stack(list(crops_at_shifts(inputs, self.stop - self.start)), dim=1)
        views_NV3HH = ((crops.float() - self.mean_3) / self.std_3).permute(0, 1, 4, 2, 3)
        both_NV3HH = torch.cat([views_NV3HH, views_NV3HH.flip(4)], dim=1)
        features_MD = self.method.network.backbone(both_NV3HH.flatten(0, 1).contiguous())
        features_ND = features_MD.unflatten(0, both_NV3HH.shape[:2]).mean(dim=1)
        return ExportedHead.forward(self, features_ND)


def export(run: str | Path, out: str | Path, format: str = "onnx") -> dict[str, Any]:
    """Write the file and return its metadata.

    `difference` in it is the largest between outputs of the file and of the model.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format `{format}` (formats: {', '.join(FORMATS)})")
    exporter = FORMATS[format]
    exporter.check()
    check_output(out)
    _check_ending(format, Path(out))
    model = load(run, "cpu")
    metadata = describe(run, model)
    kind = ExportedHead
    if metadata["input"] == "images":
        kind = ExportedShifted if model.config.data.view_set == "shifted" else Exported
    module = kind(model.method, model.temperature).eval()
    content = exporter.write(_program(module, metadata), metadata)
    difference = _difference(content, exporter, model, metadata)
    if not difference <= LARGEST_DIFFERENCE:
        others = " or ".join(name for name in FORMATS if name != format)
        raise RunFailed(
            f"the {format} file of {model.info.name} differs from the model by {difference:.2g}; "
            f"nothing was written, try --format {others}"
        )
    write_output(out, content)
    return {**metadata, "difference": difference}


def _check_ending(format: str, place: Path) -> None:
    """Refuse a file name that belongs to another format."""
    ending = place.suffix.lower()
    for name, each in FORMATS.items():
        if name != format and ending in each.endings:
            usual = FORMATS[format].endings
            advice = f"end its name in {usual[0]}" if usual else "give it another name"
            raise UserError(
                f"--out {printable(place)} names a file of --format {name}; {advice}, or give "
                f"--format {name}"
            )


def describe(run: str | Path, model: Model) -> dict[str, Any]:
    """Return the metadata of the file."""
    takes_features = features_dim(model.info.name) is not None
    return {
        "format": FORMAT,
        "labels": model.classes,
        "input": "features" if takes_features else "images",
        "input_size": model.info.dim if takes_features else model.pixels_size,
        "outputs": ["logits", "sigma"] if model.has_sigma else ["logits"],
        "thresholds": _thresholds(RunFolder(run).evaluation),
        "method": model.config.method_name,
        "backbone": model.info.name,
    }


def _thresholds(evaluation: Path) -> dict[str, dict[str, float]]:
    """Read the thresholds that the run stored; empty if it stored none."""
    if not evaluation.exists():
        return {}
    with damage_explained(evaluation):
        stored = json.loads(evaluation.read_text(encoding="utf-8"))["thresholds"]
        return {
            name: {str(share): float(value) for share, value in stored[name].items()}
            for name in FROM_OUTPUTS
            if name in stored
        }


def _examples(metadata: dict[str, Any], count: int) -> Tensor:
    size, generator = metadata["input_size"], torch.Generator().manual_seed(0)
    if metadata["input"] == "features":
        return torch.randn(count, size, generator=generator)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)


def _program(module: ExportedHead, metadata: dict[str, Any]) -> torch.export.ExportedProgram:
    examples, batch = _examples(metadata, 2), torch.export.Dim("batch", min=1)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(module, (examples,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch has no common type for what it cannot export
        raise UserError(
            f"torch cannot export {metadata['method']} on {metadata['backbone']} "
            f"({first_line(error)}); use `certvol predict` or `certvol.load` instead"
        ) from None


def _difference(
    content: bytes, exporter: Exporter, model: Model, metadata: dict[str, Any]
) -> float:
    """Compare the file with the model on random inputs, in another batch size than exported."""
    inputs = _examples(metadata, 3)
    view = inputs if metadata["input"] == "features" else model.view(inputs)
    outputs = run_batches(model.method, [view], TARGET).at_temperature(model.temperature)
    expected = [each for each in (outputs.logits_NC, outputs.sigma_N) if each is not None]
    found = exporter.run(content, inputs)
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
