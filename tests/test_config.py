from pathlib import Path

import pytest
import yaml

from certvol.config import PRESETS, SECTIONS, list_settings, read_settings_file, resolve
from certvol.errors import Interrupted, UserError
from certvol.methods import config_classes

METHODS = config_classes()


def test_command_line_beats_file_beats_preset() -> None:
    config = resolve(METHODS, "paper", {"training.cycles": 7, "training.seed": 3}, {"training.seed": "4"})
    assert (config.training.cycles, config.training.seed, config.model.norm) == (7, 4, "mixed")


def test_values_from_the_command_line_are_typed() -> None:
    config = resolve(
        METHODS,
        overrides={
            "training.learning_rate": "1e-3",
            "augment.flip": "false",
            "model.weights": "null",
            "model.classifier_layers": "1",
            "method.samples_weight": "0",
        },
    )
    assert config.training.learning_rate == 1e-3
    assert config.augment.flip is False
    assert config.model.weights is None
    assert config.model.classifier_layers == 1
    assert config.method.samples_weight == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"training.cyles": 1}, "did you mean `training.cycles`?"),
        ({"trainin.cycles": 1}, "did you mean `training.cycles`?"),
        ({"cycles": 1}, "section"),
        ({"method.num_sample": 1}, "did you mean `method.num_samples`?"),
        ({"method.name": "cpv"}, "did you mean `cvp`?"),
        ({"training.cycles": "many"}, "`training.cycles` should be a whole number, found 'many'"),
        ({"training.cycles": 1.5}, "whole number"),
        ({"training.learning_rate": "fast"}, "a number"),
        ({"augment.flip": "perhaps"}, "true or false"),
        ({"model.norm": "batch"}, "one of mixed, per_domain"),
        ({"data.image_size": "big"}, "a whole number or null"),
        ({"training.batch_size": 2}, "4 or more"),
        ({"training.learning_rate": 0}, "above 0"),
        ({"training.learning_rate": "nan"}, "a number"),
        ({"training.cycles": -1}, "not be negative"),
        ({"data.holdout": 1.0}, "at most 0.5"),
        ({"training.seed": -1}, "not be negative"),
        ({"augment.crop_area": 1.5}, "at most 1"),
        ({"method.num_samples": 0}, "above 0"),
        ({"method.samples_weight": -1}, "not be negative"),
        ({"data.holdout": 0.8}, "at most 0.5"),
        ({"training.mc_dropout": -0.5}, "not be negative"),
        ({"training.batch_size": 10**9}, "at most 65536"),
        ({"training.learning_rate": float("inf")}, "at most"),
        ({"training.adapt_learning_rate": -1}, "above 0"),
        ({"training.head_rate": 0}, "above 0"),
        ({"training.schedule_exponent": 1e308}, "at most 10"),
        ({"data.workers": 10**9}, "at most 1024"),
        ({"augment.grey": 5}, "at most 1"),
        ({"training.labelling_share": 1.5}, "at most 1"),
    ],
)
def test_a_wrong_setting_is_named(overrides: dict[str, object], words: str) -> None:
    from certvol.config import flatten

    with pytest.raises(UserError) as caught:
        resolve(METHODS, overrides=flatten(overrides, "settings"))
    assert words in str(caught.value)


def test_a_setting_of_another_method_is_unknown() -> None:
    with pytest.raises(UserError, match=r"`method\.num_samples` is a setting of the method cvp, not of basic"):
        resolve(METHODS, overrides={"method.name": "basic", "method.num_samples": 3})


def test_a_file_of_another_method_gives_its_other_settings() -> None:
    file = {"method.name": "cvp", "method.num_samples": 8, "training.cycles": 3}
    config = resolve(METHODS, file=file, overrides={"method.name": "basic"})
    assert (config.method_name, config.training.cycles) == ("basic", 3)


def test_a_file_of_another_method_gives_none_of_its_methods_settings() -> None:
    """Not even one that both have by name: can's weight is of another term than dann's."""
    file = {"method.name": "can", "method.weight": 0.123, "training.cycles": 3}
    assert resolve(METHODS, file=file).method.weight == 0.123
    config = resolve(METHODS, file=file, overrides={"method.name": "dann"})
    assert config.method == METHODS["dann"]()
    assert config.training.cycles == 3
    assert resolve(METHODS, file=file, overrides={"method.name": "dann", "method.weight": 2}).method.weight == 2
    no_name = {"method.weight": 0.123}
    assert resolve(METHODS, file=no_name, overrides={"method.name": "dann"}).method.weight == 0.123


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_fits_every_method_and_comes_back_from_its_own_yaml(
    preset: str, method: str, tmp_path: Path
) -> None:
    config = resolve(METHODS, preset, overrides={"method.name": method})
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert resolve(METHODS, file=read_settings_file(file)) == config


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(UserError, match="did you mean `quick`"):
        resolve(METHODS, "quik")


def test_presets_hold_the_settings_of_the_paper_and_of_its_authors() -> None:
    paper, authors = resolve(METHODS, "paper"), resolve(METHODS, "authors")
    assert (paper.method.num_samples, paper.method.samples_weight) == (64, 0.5)
    assert (paper.training.cycles, paper.training.cycle_steps, paper.training.momentum) == (250, 50, 0.95)
    assert (authors.method.num_samples, authors.method.samples_weight) == (32, 0.75)
    assert (authors.training.adapt_learning_rate, authors.training.schedule) == (2.5e-4, "constant")
    assert authors.training.pseudo_labels == "mc_dropout"
    assert paper.model.norm == authors.model.norm == "mixed"
    assert resolve(METHODS).model.norm == "auto"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: [1, 2", "not valid YAML"),
        ("- 1\n- 2\n", "should hold sections"),
        ("training: 3\n", "to be a section"),
        ("3: {cycles: 2}\n", "must be text"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_a_broken_settings_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        resolve(METHODS, file=read_settings_file(file))


def test_a_missing_or_binary_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_settings_file(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid YAML"):
        read_settings_file(tmp_path / "b.yaml")


def test_an_empty_file_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training:\nmethod:\n")
    assert resolve(METHODS, file=read_settings_file(file)) == resolve(METHODS)
    file.write_text("")
    assert read_settings_file(file) == {}


def test_config_yaml_has_every_section() -> None:
    assert set(yaml.safe_load(resolve(METHODS).to_yaml())) == {"method", *SECTIONS}


def test_a_stop_while_settings_are_read_is_no_fault_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(text: str) -> None:
        raise Interrupted("stopped", 143)

    file = tmp_path / "settings.yaml"
    file.write_text("training: {cycles: 2}")
    monkeypatch.setattr("yaml.safe_load", stopped)
    with pytest.raises(Interrupted):
        read_settings_file(file)


def test_the_list_of_settings_says_what_stands_beside_them() -> None:
    rows = {(name, what.partition(":")[0]): (default, what) for name, default, what in list_settings(METHODS)}
    assert rows["method.samples_weight", "of cvp"] == ("0.5", "of cvp: alpha; 0: the samples only form sigma's target")
    assert rows["method.antagonistic", "of cvp"][0] == "true"
    assert rows["method.samples_width", "of cvp"][0] == "1.0"
    defaults = {name: default for name, default, _ in list_settings(METHODS) if not name.startswith("method.")}
    assert (defaults["data.source"], defaults["data.workers"], defaults["guard.patience"]) == ("null", "0", "2")
    assert not any("\n" in what or "  " in what for _, _, what in list_settings(METHODS))
