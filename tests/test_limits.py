"""Limits on the code that keep it easy to read."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "certvol"
PLACES = ("src", "tests", "tools", "benchmarks", "examples")
FILES = sorted(file for name in PLACES for file in (ROOT / name).rglob("*.py"))
ASSETS = sorted(file for file in PACKAGE.rglob("assets/*") if file.suffix != ".py")
MOST_LINES, MOST_PARAMETERS = 400, 6
MOST_README_LINES = 120
PUBLIC = {"certvol.adapt", "CVPClassifier.__init__", "BasicClassifier.__init__"}
VAGUE = {"utils", "util", "common", "misc", "helpers", "helper"}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _short(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _functions(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function below a node, named after the class or function that holds it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(child, ast.ClassDef):
                yield f"{owner}.{child.name}", child  # type: ignore[misc]
            yield from _functions(child, child.name)
        else:
            yield from _functions(child, owner)


def test_no_file_is_long() -> None:
    lengths = {_short(file): _lines(file) for file in [*FILES, *ASSETS]}
    assert len(ASSETS) > 10
    assert {name: count for name, count in lengths.items() if count > MOST_LINES} == {}


def test_the_readme_is_short() -> None:
    assert _lines(ROOT / "README.md") <= MOST_README_LINES


def test_no_function_takes_more_than_six_parameters() -> None:
    """The public API and the estimators, whose parameters are keywords, may take more."""
    found = []
    for file in FILES:
        owner = "certvol" if file == PACKAGE / "api.py" else file.stem
        for name, function in _functions(_tree(file), owner):
            args = function.args
            names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            count = len([arg for arg in names if arg not in ("self", "cls")])
            if count > MOST_PARAMETERS and name not in PUBLIC:
                found.append(f"{_short(file)}: {name} takes {count}")
    assert found == []


@pytest.mark.parametrize(
    ("folder", "most"), [(PACKAGE, 16), (PACKAGE / "training", 12)], ids=["certvol", "training"]
)
def test_folders_hold_few_modules(folder: Path, most: int) -> None:
    names = [file.stem for file in folder.glob("*.py") if file.name != "__init__.py"]
    assert len(names) <= most, sorted(names)


def test_names_of_modules_say_what_they_hold() -> None:
    names = [file.stem for file in PACKAGE.rglob("*.py") if not file.stem.startswith("_")]
    assert VAGUE.intersection(names) == set()
    assert sys.stdlib_module_names & set(names) == set(), "shadows the standard library"


def test_no_two_classes_share_a_name() -> None:
    """Plug-ins excepted: each method has a `Method`, each rule a `Rule`, with a `Config`."""
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.ClassDef)
    )
    shared = {name for name, count in names.items() if count > 1}
    assert shared - {"Config", "Method", "Rule"} == set()


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    found = []
    for file in FILES:
        for node in ast.walk(_tree(file)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):  # of fields and settings too
                    if re.match(r"\s*(Of|By|Whose|Where)\b", text):
                        found.append(f"{_short(file)}: {text.splitlines()[0]}")
    assert found == []


def test_tests_import_no_other_tests() -> None:
    found = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                given = [alias.name for alias in node.names]
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else given
                if any(part.startswith("test_") for name in names for part in name.split(".")):
                    found.append(f"{_short(file)}, line {node.lineno}")
    assert found == []
