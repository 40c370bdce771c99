"""The formats of `certvol export`: one entry of `FORMATS` each.

Importing this module does not import torch, so that `certvol export --help` stays quick.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from certvol.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.export import ExportedProgram

METADATA_FILE = "certvol.json"  # inside a .pt2 file


@dataclass(frozen=True)
class Exporter:
    """Functions that write a program to a file of one format, and that run the file."""

    help: str
    write: "Callable[[ExportedProgram, dict[str, Any]], bytes]"
    """Returns the content of the file, from the program and the metadata."""
    run: "Callable[[bytes, Tensor], list[NDArray[np.float32]]]"
    """Runs the file's content on inputs, to compare its outputs with the model's."""
    check: Callable[[], None] = lambda: None
    """Raises UserError if a package that the format needs is missing."""
    endings: tuple[str, ...] = ()
    """The usual ends of file names, in small letters."""


def _check_onnx_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--format onnx needs the package {error.name}; run `pip install 'certvol[onnx]'`"
        ) from None


def _write_onnx(program: "ExportedProgram", metadata: dict[str, Any]) -> bytes:
    import torch

    names: dict[str, Any] = {
        "input_names": [metadata["input"]],
        "output_names": metadata["outputs"],
    }
    with quiet():
        converted = torch.onnx.export(program, dynamo=True, optimize=True, **names)
    if converted is None:
        raise AssertionError("an export into memory returns a program")
    proto = converted.model_proto
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value)
    try:
        return bytes(proto.SerializeToString())
    except ValueError:  # protobuf's limit of 2 GB
        raise UserError("this model is too large for one ONNX file; use --format torch") from None


def _run_onnx(content: bytes, inputs: "Tensor") -> "list[NDArray[np.float32]]":
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: inputs.numpy()}))


def _write_torch(program: "ExportedProgram", metadata: dict[str, Any]) -> bytes:
    import torch

    buffer = io.BytesIO()
    with quiet():
        program.example_inputs = None  # they would be the only pickle in the file
        torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(metadata)})
    return buffer.getvalue()


def _run_torch(content: bytes, inputs: "Tensor") -> "list[NDArray[np.float32]]":
    import torch

    with quiet():
        program = torch.export.load(io.BytesIO(content)).module()
    with torch.inference_mode():
        return [tensor.numpy() for tensor in program(inputs)]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what the exporters print about their own steps."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# Keys are the values of `--format`.
FORMATS = {
    "onnx": Exporter(
        "an ONNX model", _write_onnx, _run_onnx, check=_check_onnx_installed, endings=(".onnx",)
    ),
    "torch": Exporter(
        "a torch.export program, .pt2", _write_torch, _run_torch, endings=(".pt2", ".pt", ".pth")
    ),
}
