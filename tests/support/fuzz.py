"""Draw hostile input: the same in every run, or 20 times as many new ones with CERTVOL_FUZZ=20."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import save

TIMES = int(os.environ.get("CERTVOL_FUZZ", "0"))


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples * max(1, TIMES),
        deadline=None,
        derandomize=TIMES == 0,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
        ],
    )


@contextmanager
def file_of(content: bytes, name: str = "file") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


DAMAGES = ("flip", "header flip", "cut", "splice", "repeat", "overwrite", "take out")


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Draw a file and damage it in up to four ways."""
    raw = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        if not raw:
            break
        at = draw(st.integers(0, len(raw) - 1))
        length = draw(st.integers(1, 16))
        match draw(st.sampled_from(DAMAGES)):
            case "flip":
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "header flip":  # where sizes and kinds are
                raw[at % 64 % len(raw)] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del raw[at:]
            case "splice":
                other = draw(st.sampled_from(originals))
                raw[at:] = other[draw(st.integers(0, len(other) - 1)) :]
            case "repeat":
                raw[at:at] = raw[at : at + length] * draw(st.integers(1, 50))
            case "overwrite":
                raw[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "take out":
                del raw[at : at + length]
    return bytes(raw)


TENSORS = {
    "conv.weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2).half(),
    "count": torch.tensor(7),
}


SAFETENSORS = [save(TENSORS), save({"module.a": torch.ones(1)}, {"about": "x"}), save({})]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
