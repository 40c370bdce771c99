"""Settings from any text, bytes or structure resolve to valid settings, or to one sentence."""

import datetime
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.settings import SECTIONS, Config, flatten, read_settings_file, resolve, settings_of
from support.fuzz import file_of, fuzz

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
