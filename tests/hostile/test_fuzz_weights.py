"""Weights files and checkpoints with any content are read, or refused in one sentence."""

import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from certvol.errors import UserError
from certvol.nn.weights import read_weights
from certvol.runs.checkpoint import POINTER, Checkpoints, State, digest_of
from support.fuzz import SAFETENSORS, TENSORS, file_of, fuzz, json_values, mutated


def _saved(content: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


TORCH_FILES = [
    _saved(TENSORS),
    _saved({"state_dict": TENSORS}),
    _saved(TENSORS, _use_new_zipfile_serialization=False),
]


def tensors_or_error(raw: bytes) -> None:
    with file_of(raw, "w.pth") as file, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            tensors = read_weights(file)
        except UserError as error:
            tensors, sentence = {}, str(error)
        else:
            sentence = ""
    if tensors:
        assert all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in tensors.items()
        )
    else:
        assert "w.pth" in sentence
        assert len(sentence.splitlines()) == 1


@fuzz(300)
@given(
    start=st.sampled_from(
        [b"", b"\x80\x02", b"PK\x03\x04", bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b"{"]
    ),
    rest=st.binary(),
)
def test_arbitrary_bytes_as_weights(start: bytes, rest: bytes) -> None:
    tensors_or_error(start + rest)


@fuzz(400)
@given(raw=mutated(SAFETENSORS))
def test_damaged_safetensors(raw: bytes) -> None:
    tensors_or_error(raw)


@fuzz(400)
@given(raw=mutated(TORCH_FILES))
def test_damaged_torch_files(raw: bytes) -> None:
    tensors_or_error(raw)


DTYPES = "F64 F32 F16 BF16 I64 I32 I16 I8 U8 U16 U32 U64 BOOL C64 X".split()


DTYPES += "F8_E4M3 F8_E5M2 F8_E8M0 F4 F6_E2M3".split()


tensor_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES) | json_values,
        "shape": st.lists(st.integers(0, 4) | st.integers(-(2**65), 2**65), max_size=3)
        | json_values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | json_values,
    }
)


@fuzz(400)
@given(
    header=st.dictionaries(
        st.text(max_size=4) | st.just("__metadata__"), tensor_entries | json_values, max_size=3
    ),
    data=st.binary(max_size=16),
)
def test_safetensors_with_any_header(header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    tensors_or_error(len(raw).to_bytes(8, "little") + raw + data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [[], [2], [2, 0], [0]])
def test_safetensors_of_every_type(dtype: str, shape: list[int]) -> None:
    bits = {"F4": 4, "F6_E2M3": 6, "C64": 64, "BOOL": 8, "X": 8}.get(dtype) or int(
        "".join(filter(str.isdigit, dtype.split("_")[0]))
    )
    size = -(-int(np.prod(shape)) * bits // 8)
    raw = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    tensors_or_error(len(raw).to_bytes(8, "little") + raw + bytes(size))


def load_and_save(folder: Path) -> None:
    """Load, then save the next state, as a run would."""
    checkpoints = Checkpoints(folder)
    state, words = checkpoints.load()
    assert state is None or (isinstance(state.facts, dict) and isinstance(state.tensors, dict))
    assert all(isinstance(word, str) for word in words)
    assert checkpoints.exist in (True, False)
    with mock.patch("os.fsync"):
        checkpoints.save(State({"x": torch.ones(2)}, {"fresh": 1}))
    state, _ = checkpoints.load()
    assert state is not None
    assert state.facts == {"fresh": 1}


STATE_NAMES = ["state-000001.safetensors", "..", ".", "/etc/passwd", "../x", "\0", "\ud800"]


STATE_NAMES += ["a" * 300, ""]


entries = st.fixed_dictionaries(
    {},
    optional={
        "number": st.integers(-5, 10**7) | json_values,
        "file": st.sampled_from(STATE_NAMES) | json_values,
        "blake2b": json_values,
        "facts": json_values,
    },
)


@fuzz(150)
@given(content=st.lists(entries, max_size=3) | entries | json_values)
def test_any_json_as_pointer_to_checkpoints(content: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER).write_text(json.dumps(content))
        load_and_save(Path(folder))


@fuzz(100)
@given(raw=st.binary(max_size=60))
@example(raw=b"[" * 100_000)
@example(raw=b'[{"number": 1e999}]')
@example(raw=b'[{"number": ' + b"9" * 5000 + b"}]")
def test_any_bytes_as_pointer_to_checkpoints(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER).write_bytes(raw)
        load_and_save(Path(folder))


@fuzz(150)
@given(raw=st.binary(max_size=40) | mutated(SAFETENSORS))
def test_any_bytes_as_state_with_their_right_checksum(raw: bytes) -> None:
    """A stranger can write checksums too."""
    with tempfile.TemporaryDirectory() as folder:
        name = "state-000001.safetensors"
        (Path(folder) / name).write_bytes(raw)
        entry = {
            "number": 1,
            "file": name,
            "blake2b": digest_of(Path(folder) / name, {}),
            "facts": {},
        }
        (Path(folder) / POINTER).write_text(json.dumps([entry]))
        load_and_save(Path(folder))
