"""What README and docs/architecture.md say about the tree is true of the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "certvol"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def _exists(name: str) -> bool:
    """Return whether a path of the repository, of the package or of a layer exists.

    `methods/<name>.py` stands for any new file there, `_*.py` for those with an underscore.
    """
    pattern = re.sub("<[^>]*>", "*", name).rstrip("/")
    return any(any(place.glob(pattern)) for place in (ROOT, PACKAGE, *PACKAGE.glob("*/")))


def test_every_path_that_the_architecture_names_exists() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = [word for word in re.findall(r"`([^`\s]+)`", text) if re.search(r"/|\.py$", word)]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = [word for word in named if not word.startswith("RUN/")]
    assert len(paths) > 20
    assert [path for path in paths if not _exists(path)] == []
    assert [link for link in links if not (ARCHITECTURE.parent / link).exists()] == []


def test_every_module_that_a_layer_names_exists() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    layers = text.partition("| layer |")[2].partition("\n\n")[0].splitlines()[2:]
    for line in layers:
        _, names, about, _ = line.split("|")
        for name in re.findall(r"`(\w+)`", names):
            assert _exists(name) or _exists(f"{name}.py"), name
        for name in re.findall(r"`(\w+)`", about):
            [layer] = re.findall(r"`(\w+)`", names)
            assert (PACKAGE / layer / f"{name}.py").exists(), f"{layer}/{name}"


def test_the_tree_of_the_readme_names_every_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("\nsrc/certvol/\n")[2].partition("```")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    for name in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / name).is_dir(), name


def test_every_function_and_test_that_the_paper_page_names_exists() -> None:
    text = (ROOT / "docs" / "paper_to_code.md").read_text(encoding="utf-8")
    tests: dict[str, str] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        tests[file.name] = tests.get(file.name, "") + file.read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)(?:::(test_\w+))?", text)
    assert len(named) > 15
    assert [each for each in named if each[1] not in tests.get(each[0], "")] == []
    functions = re.findall(r"`((?:[a-z_]+\.)+)([A-Za-z_]+)`", text)
    layers = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for owner, name in functions:
        first, *rest = owner.rstrip(".").split(".")
        module = PACKAGE.joinpath(first, *[part for part in rest if part.islower()])
        if first in layers and module.with_suffix(".py").exists():
            assert name in module.with_suffix(".py").read_text(encoding="utf-8"), f"{owner}{name}"
        elif first in layers and first != "method":
            assert module.is_dir(), f"{owner}{name}"
