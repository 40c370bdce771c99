"""The layout's rules, read from the source itself."""

import ast
import re
from pathlib import Path

import pytest

import certvol
from certvol.methods import discover

ROOT = Path(certvol.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def _imports(path: Path) -> set[str]:
    """What a module imports of ours, as names below the package; imports for type checkers alone included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {name.removeprefix("certvol").removeprefix(".") for name in names if name.split(".")[0] == "certvol"}
    return {name for name in found if name in MODULES and name}


IMPORTS = {name: _imports(path) for name, path in MODULES.items()}


def _users_of(*targets: str) -> set[str]:
    return {
        module
        for module, used in IMPORTS.items()
        if any(name == target or name.startswith(f"{target}.") for name in used for target in targets)
    }


@pytest.mark.parametrize("module", ["alignment", "clusters", "losses", "metrics", "selection", "uncertainty"])
def test_formulas_import_nothing_of_ours(module: str) -> None:
    assert IMPORTS[module] == set()


def test_data_knows_no_networks_methods_or_training() -> None:
    assert not {user for user in _users_of("nn", "methods", "training") if user.startswith("data")}


def test_training_knows_the_protocol_and_no_method_by_name() -> None:
    for module, used in IMPORTS.items():
        if module.startswith("training"):
            assert {name for name in used if name.startswith("methods")} <= {"methods", "methods.protocol"}
    for path in (ROOT / "training").glob("*.py"):
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not strings & set(discover())


def test_only_api_and_its_parts_and_cli_join_everything() -> None:
    """`inputs`, `evaluation` and `job` are the parts of `api`: nothing below it uses them, and nothing beside it."""
    assert _users_of("api") <= {"cli", "demo", "__init__"}
    assert _users_of("job") == {"api"}
    assert _users_of("inputs") == {"job"}
    assert _users_of("evaluation") == {"api", "job"}
    assert _users_of("extraction") == {"api", "inputs"}
    assert _users_of("cli") == {"__main__"}
    assert _users_of("training.trainer") == {"job"}
    assert _users_of("arguments", "prediction", "export") == {"cli"}
    assert _users_of("analysis") <= {"job", "evaluation", "prediction", "rejection"}
    assert _users_of("rejection") == {"prediction"}
    assert _users_of("fixed_features") == {"inputs", "benchmark.plan"}


def test_benchmarks_start_runs_and_read_them_but_do_not_train() -> None:
    forbidden = {
        "api",
        "job",
        "inputs",
        "evaluation",
        "model",
        "demo",
        "training.trainer",
        "training.stepper",
        "inference",
    }
    for module, used in IMPORTS.items():
        if module.startswith("benchmark"):
            assert not used & forbidden, module
            assert not {name for name in used if name.startswith(("nn", "methods"))}, module
    assert {user for user in _users_of("benchmark") if not user.startswith("benchmark")} <= {"cli"}


def test_the_report_reads_what_runs_wrote_and_trains_nothing() -> None:
    for module, used in IMPORTS.items():
        if module.startswith("report."):
            assert not {name for name in used if name.split(".")[0] in ("nn", "methods", "model", "inference", "api")}
            assert {name for name in used if name.startswith("training")} <= {
                "training.checkpoint",
                "training.run_folder",
                "training",
            }
    assert {user for user in _users_of("report") if not user.startswith("report")} <= {"cli", "demo"}


def test_no_module_is_a_drawer_for_everything() -> None:
    assert not {name.split(".")[-1] for name in MODULES} & {"utils", "common", "misc", "helpers"}


def test_target_labels_are_read_in_one_place() -> None:
    """`folder_labels` turns target folders into labels: `evaluation` calls it, and `check`, neither of which trains."""
    users = {name for name, path in MODULES.items() if "folder_labels" in path.read_text()}
    assert users == {"evaluation", "data.folders", "data.check"}
    assert _users_of("data.check") == {"cli", "data.check_features"}
    assert _users_of("data.check_features") == {"cli"}


def test_labels_of_a_target_file_are_read_in_one_place() -> None:
    """`read_labels` opens the array: the source's reader calls it, and `known_labels`, which `evaluation` calls, and the check of
    such files, neither of which trains."""
    assert {name for name, path in MODULES.items() if "known_labels" in path.read_text()} == {
        "evaluation",
        "data.check_features",
        "data.feature_files",
    }
    assert {name for name, path in MODULES.items() if "read_labels" in path.read_text()} == {"data.feature_files"}


def test_nothing_of_ours_needs_the_estimators() -> None:
    assert _users_of("sklearn") == set()


def test_imports_form_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for used in IMPORTS[module]:
                if used != module and not module.startswith(f"{used}."):
                    visit(used, (*above, module))
            done.add(module)

    for module in MODULES:
        if module:
            visit(module, ())


def _lines_of_the_readme() -> dict[str, int]:
    """Module -> number of the entry that names it, in the README's list of where things are."""
    text = (ROOT.parents[1] / "README.md").read_text(encoding="utf-8")
    listed = text[text.index("src/certvol/\n") : text.index("\ntests/ ")]
    found: dict[str, int] = {}
    folder, entry = "", 0
    for line in listed.splitlines()[1:]:
        if head := re.match(r"  (\S+)", line):
            folder, entry = head[1].rpartition("/")[0], entry + 1
        for name in re.findall(r"[\w/]+\.py", line):
            path = name if "/" in name or not folder else f"{folder}/{name}"
            found[path.removesuffix(".py").replace("/", ".")] = entry
    return found


def test_the_readme_names_every_module_below_those_it_imports() -> None:
    listed = _lines_of_the_readme()
    files = {name for name, path in MODULES.items() if path.stem not in ("__init__", "__main__")}
    assert (
        {name for name in files if not name.startswith("methods.")} <= set(listed) <= files
    )  # a new method is one file
    upward = [(user, used) for user in listed for used in IMPORTS[user] & set(listed) if listed[used] > listed[user]]
    assert upward == []
