from pathlib import Path

import pytest
from safetensors.torch import save_file

import certvol
from certvol.benchmark import plan
from certvol.config import read_settings_file
from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.nn.small_cnn import SmallCNN
from images import tiny, write_domain

METHODS = config_classes()


def _labels(methods: list[str], vary: list[str]) -> list[str]:
    return [variant.label for variant in plan.read_variants(methods, vary, METHODS)]


def test_variants_are_named_as_their_folders() -> None:
    assert _labels(["basic", "cvp", "cvp@method.samples_weight=0"], []) == [
        "basic",
        "cvp",
        "cvp@method.samples_weight=0",
    ]
    assert _labels(["cvp@model.weights=/a/b c"], []) == ["cvp@model.weights=_a_b_c"]


def test_a_varied_setting_gives_a_row_per_value_to_the_methods_that_have_it() -> None:
    varied = ["method.num_samples=32,64", "method.samples_weight=0.1"]
    expected = ["basic", "cvp@method.num_samples=32", "cvp@method.num_samples=64", "cvp@method.samples_weight=0.1"]
    assert _labels(["basic", "cvp"], varied) == expected
    assert _labels(["cvp", "cvp"], ["model.norm=mixed,mixed"]) == ["cvp@model.norm=mixed"], "repetitions are one"
    assert _labels(["basic"], ["model.norm=mixed,auto"]) == ["basic@model.norm=mixed", "basic@model.norm=auto"]


@pytest.mark.parametrize(
    ("methods", "vary", "said"),
    [
        (["cpv"], [], "did you mean `cvp`"),
        (["cvp@x"], [], "expected SETTING=VALUE"),
        (["basic"], ["method.num_samples=1"], "none of the methods"),
        (["cvp"], ["method.num_samples=1,,2"], "needs values"),
        (["cvp"], ["method.num_samples"], "expected SETTING=VALUE"),
        (["cvp"], ["training.seed=1,2"], "--vary training.seed=1,2: a benchmark sets `training.seed`.*use --seeds"),
        (["cvp"], ["data.target=/tmp"], "use --data and --tasks"),
        (["cvp"], ["method.name=cvp,basic"], "use --methods"),
        (["cvp@training.seed=1"], [], "use --seeds"),
        (
            ["cvp@model.weights=a/b", "cvp@model.weights=a_b"],
            [],
            "weights=a/b and cvp@model.weights=a_b .* called cvp@",
        ),
        (["cvp"], ["model.weights=a/b,a_b"], "would both be called"),
    ],
)
def test_variants_that_are_none(methods: list[str], vary: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _labels(methods, vary)


def test_the_later_beats_the_earlier() -> None:
    variant = plan.Variant("cvp", (("training.cycles", "5"),))
    config = plan.settings_of(
        variant,
        METHODS,
        "authors",
        {"model.backbone": "a", "data.image_size": 16, "training.batch_size": 8},
        {"model.backbone": "b", "training.batch_size": 16},
        {"model.backbone": "c", "training.cycles": "7", "model.weights": "w.pth"},
    )
    assert (config.model.backbone, config.data.image_size, config.training.batch_size) == ("c", 16, 16)
    assert config.training.cycles == 5
    assert config.method.num_samples == 32, "the preset's"
    assert config.model.weights == str(Path("w.pth").absolute())


def test_settings_of_one_method_are_for_it_alone() -> None:
    given = {"method.num_samples": "8"}
    variants = plan.read_variants(["basic", "cvp"], [], METHODS)
    plan.check_given(given, variants, METHODS)
    configs = [plan.settings_of(variant, METHODS, "default", {}, {}, given) for variant in variants]
    assert configs[1].method.num_samples == 8
    assert not hasattr(configs[0].method, "num_samples")
    with pytest.raises(UserError, match="setting of none of the methods"):
        plan.check_given(given, variants[:1], METHODS)
    for name, flag in (("method.name", "--methods"), ("training.seed", "--seeds"), ("data.source", "--data")):
        with pytest.raises(UserError, match=f"use {flag}"):
            plan.check_given({name: "1"}, variants, METHODS)
    with pytest.raises(UserError, match="unknown setting"):
        plan.settings_of(variants[0], METHODS, "default", {}, {}, {"training.cycle": 3})


def test_what_each_run_has_of_its_own_is_passed_over_in_a_file() -> None:
    file = {"data.source": "/a", "data.target": "/b", "training.seed": 3, "method.name": "cvp"}
    config = plan.settings_of(plan.Variant("basic"), METHODS, "default", {}, file, {})
    assert (config.data.source, config.data.target, config.method_name) == (None, None, "basic")


def test_a_file_of_one_method_gives_others_none_of_its_methods_settings() -> None:
    file = {"method.name": "can", "method.weight": 0.123, "training.cycles": 3}
    can, dann = (plan.settings_of(plan.Variant(n), METHODS, "default", {}, file, {}) for n in ("can", "dann"))
    assert (can.method.weight, dann.method) == (0.123, METHODS["dann"]())
    assert can.training.cycles == dann.training.cycles == 3
    given = plan.settings_of(plan.Variant("dann"), METHODS, "default", {}, file, {"method.weight": "2"})
    assert given.method.weight == 2


def test_a_number_has_one_label_however_it_is_spelt() -> None:
    def label(value: str) -> str:
        return plan.Variant("cvp", (("method.samples_weight", value),)).label.partition("=")[2]

    assert label("0") == label("0.0") == label("0.") == "0"
    assert label("0.50") == "0.5"
    as_they_are = ("100", "1e-3", "1e16", "auto", "nan", "a.0", "1_0.0")
    assert tuple(map(label, as_they_are)) == as_they_are


def test_a_run_that_is_there_must_have_the_same_settings(tmp_path: Path) -> None:
    variant = plan.Variant("cvp")
    config = plan.settings_of(variant, METHODS, "quick", {}, {}, {})
    plan.check_same_settings(tmp_path, config, METHODS)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    elsewhere = plan.settings_of(variant, METHODS, "quick", {}, {}, {"training.device": "cpu", "training.seed": 3})
    plan.check_same_settings(tmp_path, elsewhere, METHODS)
    longer = plan.settings_of(variant, METHODS, "quick", {}, {}, {"training.cycles": 61})
    with pytest.raises(UserError, match=r"`training.cycles` 60, now it is 61"):
        plan.check_same_settings(tmp_path, longer, METHODS)
    (tmp_path / "config.yaml").write_text(config.to_yaml().replace("cycles:", "cycels:"))
    with pytest.raises(UserError, match=r"settings that are none now .*cycels"):
        plan.check_same_settings(tmp_path, config, METHODS)
    (tmp_path / "config.yaml").write_text("{{{")  # of its run it is told that it failed; others go on
    plan.check_same_settings(tmp_path, longer, METHODS)


@pytest.mark.parametrize("name", ["training.tensorboard", "training.checkpoint_previous"])
def test_what_changes_no_result_may_differ(name: str, tmp_path: Path) -> None:
    one, other = (plan.settings_of(plan.Variant("cvp"), METHODS, "quick", {}, {}, {name: v}) for v in (True, False))
    (tmp_path / "config.yaml").write_text(one.to_yaml())
    plan.check_same_settings(tmp_path, other, METHODS)


@pytest.mark.parametrize("weights", ["none", "a file"])
def test_what_a_method_in_closed_form_changes_is_planned(weights: str, tmp_path: Path) -> None:
    if weights == "a file":
        weights = str(tmp_path / "w.safetensors")
        save_file(SmallCNN().state_dict(), weights)
    given = tiny(method__name="coral", model__weights=weights, model__norm="auto")
    del given["method.name"]
    planned = plan.settings_of(plan.Variant("coral"), METHODS, "default", {}, {}, given)
    assert planned.model.train == ("all" if weights == "none" else "head")
    source, target = write_domain(tmp_path / "source", 4), write_domain(tmp_path / "target", 4, seed=1)
    job = plan.Job("A-B", "coral", 0, tmp_path / "run", tmp_path / "s.yaml", source, target)
    job.settings.write_text(planned.to_yaml())
    certvol.adapt(source, target, job.folder, config=job.settings)
    plan.check_same_settings(job.folder, planned, METHODS)
    again = read_settings_file(job.folder / "config.yaml")
    assert plan.settings_of(plan.Variant("coral"), METHODS, "default", {}, again, {}) == planned
