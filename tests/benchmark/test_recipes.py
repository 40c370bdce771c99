from pathlib import Path

import pytest

from certvol.benchmark.plan import Variant, settings_of
from certvol.benchmark.suites import SUITES
from certvol.config import read_settings_file
from certvol.methods import config_classes

RECIPES = Path(__file__).parents[2] / "recipes"
METHODS = config_classes()
OWN = {"visda-2017-paper": {"training.schedule_exponent": 2.25}}  # where the paper departs from its own settings


def test_every_suite_has_both() -> None:
    names = {f"{name}-{preset}" for name in SUITES for preset in ("paper", "authors") if name != "digits"} | {"digits"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == names


@pytest.mark.parametrize("name", [name for name in SUITES if name != "digits"])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_a_recipe_is_the_preset_on_the_suites_backbone(name: str, preset: str) -> None:
    path = RECIPES / f"{name}-{preset}.yaml"
    suite, file = SUITES[name], read_settings_file(path)
    for variant in (Variant("cvp"), Variant("basic")):
        by_recipe = settings_of(variant, METHODS, suite.preset, suite.settings, file, {})
        by_preset = settings_of(variant, METHODS, preset, suite.settings, OWN.get(path.stem, {}), {})
        assert by_recipe == by_preset
    assert by_recipe.model.backbone.startswith(f"{suite.backbone}.")
    head = path.read_text().split("method:")[0]
    for words in (
        f"certvol benchmark {name} --data ROOT",
        f"--config recipes/{path.name}",
        "Hours on one GPU",
        "Expected",
    ):
        assert words in head, words


def test_the_recipe_of_digits_is_what_runs_without_one() -> None:
    suite = SUITES["digits"]
    file = read_settings_file(RECIPES / "digits.yaml")
    variant = Variant("cvp")
    with_it = settings_of(variant, METHODS, "default", {}, file, {})
    assert with_it == settings_of(variant, METHODS, suite.preset, suite.settings, {}, {})
