import json
from pathlib import Path

import pytest

from certvol.benchmark import plan
from certvol.benchmark.plan import BenchmarkOptions
from certvol.benchmark.preflight import check_folder, check_options, check_same_settings
from certvol.errors import UserError
from certvol.settings import Config


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("workers", 0, "--workers"),
        ("seeds", [-1], "--seeds"),
        ("seeds", [], "--seeds"),
        ("gpu_share", 2.0, "--gpu-share"),
        ("validator", "luck", "unknown validator `luck`"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_options(BenchmarkOptions(suite="digits", out=Path("out"), **{option: value}))  # type: ignore[arg-type]


def _about(out: Path, suite: str, root: Path | None) -> None:
    about = {"suite": suite, "data": None if root is None else str(root)}
    (out / "benchmark.json").write_text(json.dumps(about))


def test_a_run_and_another_suite_are_refused(tmp_path: Path) -> None:
    check_folder(tmp_path, "digits", None)
    _about(tmp_path, "office-31", None)
    check_folder(tmp_path, "office-31", None)
    with pytest.raises(UserError, match="holds the benchmark office-31, not digits"):
        check_folder(tmp_path, "digits", None)
    (tmp_path / "benchmark.json").write_text("{")
    with pytest.raises(UserError, match=r"benchmark.json is damaged"):
        check_folder(tmp_path, "digits", None)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is a run"):
        check_folder(tmp_path, "digits", None)


@pytest.mark.parametrize("name", ["results.csv", "table.md", "settings"])
def test_a_folder_with_files_of_the_user_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("does not matter")
    check_folder(tmp_path, "digits", None)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds {name}, which no benchmark wrote"):
        check_folder(tmp_path, "digits", None)
    _about(tmp_path, "digits", None)
    check_folder(tmp_path, "digits", None)


def test_another_data_root_is_refused_but_links_and_moves_are_not(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    _about(tmp_path, "office-31", one)
    check_folder(tmp_path, "office-31", one)
    with pytest.raises(UserError, match=r"were made from .*/one, not from .*/other; .*--data"):
        check_folder(tmp_path, "office-31", other)
    (tmp_path / "link").symlink_to(one)
    check_folder(tmp_path, "office-31", tmp_path / "link")
    one.rename(tmp_path / "moved")
    check_folder(tmp_path, "office-31", tmp_path / "moved")


def _config(**given: object) -> Config:
    settings = {name.replace("__", "."): value for name, value in given.items()}
    return plan.settings_of(plan.Variant("cvp"), "quick", given=settings)


def test_a_run_must_have_been_made_with_the_planned_settings(tmp_path: Path) -> None:
    config = _config()
    check_same_settings(tmp_path, config)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    longer = _config(training__cycles=61)
    with pytest.raises(UserError, match=r"`training.cycles` 60, now it is 61"):
        check_same_settings(tmp_path, longer)
    with pytest.raises(UserError, match=r"`data.max_megapixels` 179.0, now it is 50"):
        check_same_settings(tmp_path, _config(data__max_megapixels=50.0))
    (tmp_path / "config.yaml").write_text(config.to_yaml().replace("cycles:", "cycels:"))
    with pytest.raises(UserError, match=r"made with invalid settings .*cycels"):
        check_same_settings(tmp_path, config)
    (tmp_path / "config.yaml").write_text("{{{")  # that run failed; others continue
    check_same_settings(tmp_path, longer)


@pytest.mark.parametrize(
    "given",
    [
        {"training__device": "cpu", "training__seed": 3},
        {"training__tensorboard": True},
        {"training__checkpoint_previous": True},
    ],
)
def test_settings_without_effect_on_the_result_may_differ(
    given: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(_config().to_yaml())
    check_same_settings(tmp_path, _config(**given))
