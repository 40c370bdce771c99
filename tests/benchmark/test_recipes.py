from pathlib import Path

import pytest

from certvol.benchmark.plan import Variant, settings_of
from certvol.benchmark.published import published
from certvol.benchmark.suites import SUITES
from certvol.settings import read_settings_file

RECIPES = Path(__file__).parents[2] / "recipes"
OWN = {
    "visda-2017-paper": {"training.schedule_exponent": 2.25}
}  # where the paper departs from its own settings


WITH_RECIPES = [name for name in SUITES if list(RECIPES.glob(f"{name}-*.yaml"))]


def test_every_suite_with_published_rows_has_recipes() -> None:
    assert {name for name in SUITES if name in published()["suites"]} <= set(WITH_RECIPES)


def test_every_recipe_is_of_a_suite_and_a_preset() -> None:
    names = {f"{name}-{preset}" for name in WITH_RECIPES for preset in ("paper", "authors")}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == names | {"digits"}


@pytest.mark.parametrize("name", WITH_RECIPES)
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_a_recipe_is_the_preset_on_the_suites_backbone(name: str, preset: str) -> None:
    path = RECIPES / f"{name}-{preset}.yaml"
    suite, file = SUITES[name], read_settings_file(path)
    for variant in (Variant("cvp"), Variant("basic")):
        by_recipe = settings_of(variant, suite.preset, suite.settings, file)
        by_preset = settings_of(variant, preset, suite.settings, OWN.get(path.stem))
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
    with_it = settings_of(variant, file=file)
    assert with_it == settings_of(variant, suite.preset, suite.settings)
