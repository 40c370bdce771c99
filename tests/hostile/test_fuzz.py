"""Everything that reads a file either keeps its promise on arbitrary input or raises its own error.

The examples are the same in every run. CERTVOL_FUZZ=20 tries 20 times as many, new ones each time.
"""

import csv
import datetime
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from certvol.data.decoding import UnreadableImage, decode
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.nn.weights import read_weights
from certvol.predict.forward import Outputs
from certvol.predict.outcome import predictions_csv
from certvol.runs.checkpoint import POINTER, Checkpoints, State, digest_of
from certvol.runs.tables import FORMULA_SIGNS, label_cell, path_cell, read_column, write_text
from certvol.settings import SECTIONS, Config, flatten, read_settings_file, resolve, settings_of
from support.corpus import Pictures, encoded

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


def _images() -> list[bytes]:
    picture = Pictures(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture(9, 7) for _ in range(3)]
    rgb, wide = picture(9, 7), picture.rng.integers(0, 65536, (7, 9), dtype=np.uint16)
    return [
        encoded(rgb, "JPEG", exif=exif),
        encoded(rgb, "JPEG", progressive=True, icc_profile=bytes(200)),
        encoded(rgb.convert("CMYK"), "JPEG"),
        encoded(rgb.convert("L"), "JPEG"),
        encoded(rgb, "PNG", exif=exif),
        encoded(rgb.convert("RGBA"), "PNG"),
        encoded(rgb.convert("P"), "PNG", transparency=1),
        encoded(rgb.convert("1"), "PNG"),
        encoded(Image.fromarray(wide), "PNG"),
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        encoded(rgb, "BMP"),
        encoded(rgb.convert("P"), "BMP"),
        encoded(rgb, "DIB"),
        encoded(rgb, "WEBP"),
        encoded(rgb.convert("RGBA"), "WEBP", lossless=True, exif=exif),
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encoded(rgb.convert("P"), "GIF", transparency=1),
        encoded(rgb, "TIFF"),
        encoded(rgb, "TIFF", compression="tiff_lzw"),
        encoded(rgb, "TIFF", compression="jpeg"),
        encoded(rgb.convert("CMYK"), "TIFF", compression="tiff_adobe_deflate"),
        encoded(Image.fromarray(wide), "TIFF"),
        encoded(Image.fromarray(wide.astype(np.float32)), "TIFF"),
        encoded(rgb.convert("1"), "TIFF", compression="group4"),
        encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
    ]


IMAGES = _images()
MAGIC = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"BM",
    b"RIFF\x40\0\0\0WEBP",
    b"GIF89a",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
)


def check_decoding(raw: bytes, size: int | None) -> bool:
    """Return whether the bytes are an image."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            pixels = decode(raw, size, 1.0)
        except UnreadableImage as error:
            reason: str | None = error.reason
        else:
            reason = None
    if reason is not None:
        assert 0 < len(reason) < 200
        assert printable(reason) == reason
        return False
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert 0 < pixels.shape[0] * pixels.shape[1] <= 1_000_000
    assert size is None or pixels.shape == (size, size, 3)
    return True


@pytest.mark.parametrize("raw", IMAGES)
def test_the_images_that_are_mutated_can_be_read(raw: bytes) -> None:
    assert check_decoding(raw, 8)


@fuzz(500)
@given(
    start=st.sampled_from([b"", *MAGIC]),
    rest=st.binary(max_size=300),
    size=st.sampled_from([1, 8, None]),
)
def test_arbitrary_bytes_as_an_image(start: bytes, rest: bytes, size: int | None) -> None:
    check_decoding(start + rest, size)


@fuzz(1500)
@given(raw=mutated(IMAGES), size=st.sampled_from([1, 8, 33, None]))
def test_a_damaged_image_gives_pixels_or_a_reason(raw: bytes, size: int | None) -> None:
    check_decoding(raw, size)


METHODS = config_classes()
FIELDS = {
    **{section: [each.name for each in settings_of(cls)] for section, cls in SECTIONS.items()},
    "method": ["name", *(each.name for each in settings_of(METHODS["cvp"]))],
}
SETTINGS = [f"{section}.{name}" for section, names in FIELDS.items() for name in names]


TYPES = {
    f"{section}.{name}": kind
    for section, cls in [*SECTIONS.items(), *(("method", cls) for cls in METHODS.values())]
    for name, kind in get_type_hints(cls).items()
} | {"method.name": str}
DEFAULTS = flatten(resolve(METHODS).as_dict(), "settings")


def config_or_error(read: Callable[[], Config]) -> None:
    try:
        config = read()
    except UserError as error:
        sentence = str(error)
    else:
        check_round_trip(config)
        return
    assert 0 < len(sentence.strip()) < 2000


def check_round_trip(config: Config) -> None:
    """Check that values have the declared types and survive being written and read."""
    flat = flatten(config.as_dict(), "settings")
    assert {name: value for name, value in flat.items() if not _fits(value, TYPES[name])} == {}
    with file_of(config.to_yaml().encode()) as file:
        written = read_settings_file(file)
    assert repr(written) == repr(flat)
    changed = {
        name: value for name, value in written.items() if repr(value) != repr(DEFAULTS.get(name))
    }
    assert repr(resolve(METHODS, file={"method.name": config.method_name, **changed})) == repr(
        config
    )


def _fits(value: object, kind: Any) -> bool:
    """Return whether the type is exactly right: true is not 1."""
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    return type(value) in (get_args(kind) or (kind,))


def from_file(content: str | bytes) -> None:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    with file_of(raw, "settings.yaml") as file:
        config_or_error(lambda: resolve(METHODS, file=read_settings_file(file)))


TOKENS = [
    *SETTINGS,
    *FIELDS,
    *(name for names in FIELDS.values() for name in names),
    *": |: |- |\n|\n  |\n    |, |[|]|{|}|#|'|\"|&a |*a|<<: |? |!|!!|%|@|`|>|\\".split("|"),
    *"---\n|...\n|\t|\0|=|~|.|-|+|_|/".split("|"),
    *"null true no 0 -1 1.5 1e999 -.inf .nan 0x1f 0o17 1:30 1_000 2001-12-14 2001-13-45".split(),
    *"cvp none auto !!int !!float !!bool !!null !!binary !!timestamp !!set !!omap !!pairs".split(),
    *"!!str !!map !!seq !!python/name:os.system".split(),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from("cvp|basic|nope|auto|none|1|1e-3|true|| |[|{a: 1}|2001-13-45".split("|")),
    st.binary(max_size=4),
    st.dates(),
    st.datetimes(),
)
names = st.one_of(
    st.sampled_from([name for own in FIELDS.values() for name in own]),
    st.text(max_size=5),
    st.integers(),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names, inner, max_size=3)
        | st.sets(st.integers(), max_size=2)
    ),
    max_leaves=6,
)
structures = st.one_of(
    st.dictionaries(
        st.sampled_from(list(FIELDS)), st.dictionaries(names, values, max_size=3), max_size=3
    ),
    st.dictionaries(st.sampled_from(SETTINGS), values, max_size=3),
    values,
)


@fuzz(150)
@given(tokens=st.lists(st.sampled_from(TOKENS), max_size=14))
def test_arbitrary_text_as_settings(tokens: list[str]) -> None:
    from_file("".join(tokens))


@fuzz(60)
@given(raw=st.binary(max_size=60))
def test_arbitrary_bytes_as_settings(raw: bytes) -> None:
    from_file(raw)


@fuzz(60)
@given(structure=structures)
def test_arbitrary_structures_as_settings(structure: Any) -> None:
    from_file(yaml.safe_dump(structure, allow_unicode=True))


@fuzz(60)
@given(structure=st.dictionaries(st.sampled_from([*SETTINGS, *FIELDS]), values, max_size=3))
def test_arbitrary_structures_from_python(structure: dict[str, Any]) -> None:
    config_or_error(lambda: resolve(METHODS, overrides=flatten(structure, "settings")))


words = st.one_of(
    st.text(max_size=12),
    st.lists(st.sampled_from(TOKENS), max_size=4).map("".join),
    st.sampled_from("1 0 -1 1e3 1e400 nan inf .inf -.inf .nan true False null none ~".split()),
    st.sampled_from("[] {} 1.0 ٣ 1_0 0x10 '' \"\"".split()),
    st.integers().map(str),
    st.floats().map(str),
)


@fuzz(200)
@given(name=st.sampled_from(SETTINGS), value=words)
@example(name="method.name", value="")
def test_arbitrary_words_for_every_setting(name: str, value: str) -> None:
    config_or_error(lambda: resolve(METHODS, overrides={name: value}))


LAUGHS = ", ".join(
    ["&a0 [l, l, l, l]"] + [f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 5)]
)
NASTY = {
    "no such day": "training: {cycles: 2001-13-45}",
    "no such hour": "training: {cycles: 2001-12-14 25:99:99}",
    "tag int": "training: {cycles: !!int many}",
    "tag float": "training: {cycles: !!float many}",
    "tag bool": "training: {cycles: !!bool perhaps}",
    "tag timestamp": "training: {cycles: !!timestamp now}",
    "a number of 5,000 digits": f"training: {{cycles: {'9' * 5000}}}",
    "deep": "[" * 5000,
    "deep and closed": "training: {cycles: " + "[" * 300 + "]" * 300 + "}",
    "a list that holds itself": "training: {cycles: &a [*a]}",
    "a map that holds itself": "training: &a {cycles: *a}",
    "everything in itself": "&a {training: *a}",
    "a list as the method": "method: {name: [cvp]}",
    "a map as the method": "method: {name: {a: 1}}",
    "a list as a setting": "training: {cycles: [1, 2]}",
    "laughs": f"training: [{LAUGHS}]",
    "laughs in a setting": f"training: {{cycles: [{LAUGHS}]}}",
    "laughs as text": f"data: {{source: [{LAUGHS}]}}",
    "laughs as the method": f"method: {{name: [{LAUGHS}]}}",
    "laughs as another setting": f"no: {{such: [{LAUGHS}]}}",
    "null for a number": "training: {cycles: null}",
    "null for a size": "training: {batch_size: null}",
    "null for a flag": "augment: {flip: null}",
    "null for a name": "model: {backbone: null}",
    "null for a choice": "model: {norm: null}",
    "null for the method": "method: {name: null}",
    "true for a number": "training: {cycles: true}",
    "a number for text": "data: {source: 3}",
    "a number that is text": "data: {source: '3'}",
    "a null that is text": "data: {source: 'null'}",
    "a list that is text": "data: {source: '[1, 2]'}",
    "a path with odd bytes": 'data: {source: "/caf\\udce9\\n"}',
    "an infinite rate": "training: {learning_rate: .inf}",
    "a rate below 0": "training: {adapt_learning_rate: -1}",
    "keys that are lists": "? [1, 2]\n: 3",
    "the same key twice": "training: {cycles: 1, cycles: 2}",
    "a merge with itself": "training: &a {<<: *a}",
    "a very long word": f"training: {{cycles: {'x' * 100_000}}}",
    "a very long name": f"training: {{{'x' * 1000}: 1}}",
    "two documents": "training: {cycles: 1}\n---\ntraining: {cycles: 2}",
    "a byte order mark": "\ufefftraining: {cycles: 1}",
    "NUL": "training: {cycles: 1\0}",
    "a surrogate": 'data: {source: "\\ud800"}',
    "NUL in a path": 'data: {source: "a\\0b"}',
    "dates": f"data: {{source: {datetime.date(2001, 1, 1)}}}",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in NASTY.items()])
def test_nasty_settings_files(text: str) -> None:
    from_file(text)


def _saved(content: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


TENSORS = {
    "conv.weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2).half(),
    "count": torch.tensor(7),
}
SAFETENSORS = [save(TENSORS), save({"module.a": torch.ones(1)}, {"about": "x"}), save({})]
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


# Any bytes but NUL and the slash, as a file system returns them.
file_names = st.one_of(
    st.binary(min_size=1, max_size=12).map(
        lambda raw: raw.replace(b"\0", b"_").replace(b"/", b"|")
    ),
    st.text(
        st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=8
    ).map(str.encode),
    st.lists(
        st.sampled_from([bytes([c]) for c in b"=+-@\t\r\n\"',; a\xff\\"] + [b"./", b"$'"]),
        min_size=1,
        max_size=6,
    ).map(b"".join),
).map(os.fsdecode)


def table_of(paths: list[str], classes: list[str]) -> str:
    rng = np.random.default_rng(len(paths))
    probabilities = rng.random((len(paths), len(classes))).astype(np.float32)
    return predictions_csv(
        paths, classes, Outputs(probabilities, rng.normal(size=len(paths)).astype(np.float32))
    )


@fuzz(300)
@given(
    paths=st.lists(file_names, min_size=1, max_size=6, unique=True),
    classes=st.lists(file_names, min_size=1, max_size=4, unique=True),
)
def test_any_names_make_a_valid_predictions_csv(paths: list[str], classes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "predictions.csv"
        write_text(file, table_of(paths, classes))
        with file.open(encoding="utf-8", newline="") as opened:
            rows = list(csv.reader(opened, strict=True))
        assert rows[0] == ["path", "label", "probability", "sigma"]
        assert [len(row) for row in rows] == [4] * (len(paths) + 1)
        assert sorted(row[0] for row in rows[1:]) == sorted(map(path_cell, paths))
        assert {row[1] for row in rows[1:]} <= set(map(label_cell, classes))
        assert read_column(file, "path") == [row[0] for row in rows[1:]]


@fuzz(300)
@given(
    paths=st.lists(file_names, min_size=1, max_size=6, unique=True),
    classes=st.lists(file_names, min_size=1, max_size=4, unique=True),
)
def test_no_cell_of_predictions_csv_is_a_formula(paths: list[str], classes: list[str]) -> None:
    """A spreadsheet may read CR as the end of a line. Negative numbers are not formulas."""
    for text in (table_of(paths, classes), table_of(paths, classes).replace("\r", "\n")):
        for row in csv.reader(io.StringIO(text, newline="")):
            assert not [cell for cell in row[:2] if cell.startswith(FORMULA_SIGNS)], row


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
