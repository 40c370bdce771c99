from pathlib import Path

import pytest
import yaml

from certvol.errors import Interrupted, UserError
from certvol.methods import config_classes
from certvol.settings import (
    PRESETS,
    SECTIONS,
    flatten,
    list_settings,
    read_settings_file,
    resolve,
    settings_of,
)

METHODS = config_classes()


def test_command_line_beats_file_beats_preset() -> None:
    config = resolve(
        METHODS, "paper", {"training.cycles": 7, "training.seed": 3}, {"training.seed": "4"}
    )
    assert (config.training.cycles, config.training.seed, config.model.norm) == (7, 4, "mixed")


def test_choices_that_a_higher_package_names_are_checked_and_listed() -> None:
    choices, given = {"guard.select": ("last", "bnm")}, {"guard.select": "snd"}
    assert resolve(METHODS, overrides=given).guard.select == "snd"  # without the names: unchecked
    with pytest.raises(UserError, match=r"`guard\.select` should be one of last, bnm, found 'snd'"):
        resolve(METHODS, overrides=given, choices=choices)
    rows = {name: allowed for name, _, allowed, _ in list_settings(METHODS, choices=choices)}
    assert rows["guard.select"] == "last, bnm"


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
def test_an_invalid_setting_is_refused_by_name(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(METHODS, overrides=flatten(overrides, "settings"))
    assert words in str(caught.value)


def test_a_setting_of_another_method_is_unknown() -> None:
    with pytest.raises(
        UserError, match=r"`method\.num_samples` is a setting of the method cvp, not of basic"
    ):
        resolve(METHODS, overrides={"method.name": "basic", "method.num_samples": 3})


def test_a_file_for_another_method_gives_the_settings_of_all_sections_but_method() -> None:
    file = {"method.name": "cvp", "method.num_samples": 8, "training.cycles": 3}
    config = resolve(METHODS, file=file, overrides={"method.name": "basic"})
    assert (config.method_name, config.training.cycles) == ("basic", 3)


def test_a_file_for_another_method_gives_no_method_settings() -> None:
    """Even if both methods have one of that name: it weighs another term."""
    file = {"method.name": "can", "method.weight": 0.123, "training.cycles": 3}
    assert resolve(METHODS, file=file).method.weight == 0.123
    config = resolve(METHODS, file=file, overrides={"method.name": "dann"})
    assert config.method == METHODS["dann"]()
    assert config.training.cycles == 3
    given = {"method.name": "dann", "method.weight": 2}
    assert resolve(METHODS, file=file, overrides=given).method.weight == 2
    no_name = {"method.weight": 0.123}
    assert resolve(METHODS, file=no_name, overrides={"method.name": "dann"}).method.weight == 0.123


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_and_method_is_read_back_equal_from_its_yaml(
    preset: str, method: str, tmp_path: Path
) -> None:
    config = resolve(METHODS, preset, overrides={"method.name": method})
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert resolve(METHODS, file=read_settings_file(file)) == config


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `quick`"):
        resolve(METHODS, "quik")


def test_presets_hold_the_settings_of_the_paper_and_its_authors() -> None:
    paper, authors = resolve(METHODS, "paper"), resolve(METHODS, "authors")
    assert (paper.method.num_samples, paper.method.samples_weight) == (64, 0.5)
    training = paper.training
    assert (training.cycles, training.cycle_steps, training.momentum) == (250, 50, 0.95)
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


def test_a_stop_signal_while_reading_settings_is_not_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(text: str) -> None:
        raise Interrupted("stopped", 143)

    file = tmp_path / "settings.yaml"
    file.write_text("training: {cycles: 2}")
    monkeypatch.setattr("yaml.SafeLoader.get_single_data", stopped)
    with pytest.raises(Interrupted):
        read_settings_file(file)


def test_the_list_of_settings_reads_the_declarations() -> None:
    rows = {
        (name, what.partition(":")[0]): (default, what)
        for name, default, _, what in list_settings(METHODS)
    }
    default, what = rows["method.samples_weight", "cvp"]
    assert default == "0.5"
    assert what.startswith("cvp: Alpha, the weight of the samples' loss")
    assert rows["method.antagonistic", "cvp"][0] == "true"
    allowed = {name: text for name, _, text, _ in list_settings(METHODS)}
    assert allowed["model.train"] == "auto, all, last_block, head"
    assert allowed["training.batch_size"] == ">= 4, <= 65536"
    assert allowed["data.source"] == ""
    defaults = {name: default for name, default, *_ in list_settings(METHODS)}
    assert defaults["data.source"] == "null"
    assert defaults["data.workers"] == "0"
    assert defaults["model.train"] == "auto"  # of the default preset, not the declaration
    assert all(what and "\n" not in what for *_, what in list_settings(METHODS))


def test_every_section_setting_has_help_and_every_number_a_range() -> None:
    for section, cls in SECTIONS.items():
        for each in settings_of(cls):
            assert each.help, f"{section}.{each.name}"
            if each.kind in (int, float) and not each.choices:
                assert each.fault(each.default) is None, f"{section}.{each.name}"
                assert each.fault(-1.0) is not None, f"{section}.{each.name}"


def test_the_yaml_of_a_config_explains_every_setting_and_reads_back_equal(tmp_path: Path) -> None:
    config = resolve(METHODS, "authors", {}, {"data.source": "a: #b", "training.seed": 3})
    text = config.to_yaml()
    assert (
        "  # Smallest share of the image's area that a random crop keeps.\n  crop_area: 0.75\n"
        in text
    )
    (tmp_path / "config.yaml").write_text(text)
    assert resolve(METHODS, "default", read_settings_file(tmp_path / "config.yaml")) == config


def test_a_name_without_its_section_suggests_the_whole_name() -> None:
    with pytest.raises(UserError, match=r"did you mean `training\.cycles`"):
        resolve(METHODS, overrides={"x.cycles": 3})
