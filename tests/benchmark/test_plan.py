from pathlib import Path

import pytest
from safetensors.torch import save_file

import certvol
from certvol.benchmark import plan
from certvol.benchmark.preflight import check_same_settings
from certvol.errors import UserError
from certvol.nn.small_cnn import SmallCNN
from certvol.settings import read_settings_file
from support.images import tiny, write_domain


def _labels(methods: list[str], vary: list[str]) -> list[str]:
    return [variant.label for variant in plan.read_variants(methods, vary)]


def test_variants_are_named_as_their_folders() -> None:
    assert _labels(["basic", "cvp", "cvp@method.samples_weight=0"], []) == [
        "basic",
        "cvp",
        "cvp@method.samples_weight=0",
    ]
    assert _labels(["cvp@model.weights=/a/b c"], []) == ["cvp@model.weights=_a_b_c"]


def test_a_varied_setting_gives_a_row_per_value_to_the_methods_that_have_it() -> None:
    varied = ["method.num_samples=32,64", "method.samples_weight=0.1"]
    expected = [
        "basic",
        "cvp@method.num_samples=32",
        "cvp@method.num_samples=64",
        "cvp@method.samples_weight=0.1",
    ]
    assert _labels(["basic", "cvp"], varied) == expected
    assert _labels(["cvp", "cvp"], ["model.norm=mixed,mixed"]) == ["cvp@model.norm=mixed"], (
        "repetitions are one"
    )
    assert _labels(["basic"], ["model.norm=mixed,auto"]) == [
        "basic@model.norm=mixed",
        "basic@model.norm=auto",
    ]


@pytest.mark.parametrize(
    ("methods", "vary", "said"),
    [
        (["cpv"], [], "did you mean `cvp`"),
        (["cvp@x"], [], "expected SETTING=VALUE"),
        (["basic"], ["method.num_samples=1"], "not a setting of basic"),
        (["cvp"], ["method.num_samples=1,,2"], "needs values"),
        (["cvp"], ["method.num_samples"], "expected SETTING=VALUE"),
        (
            ["cvp"],
            ["training.seed=1,2"],
            "--vary training.seed=1,2: a benchmark sets `training.seed`.*use --seeds",
        ),
        (["cvp"], ["data.target=/tmp"], "use --data and --tasks"),
        (["cvp"], ["method.name=cvp,basic"], "use --methods"),
        (["cvp@training.seed=1"], [], "use --seeds"),
        (
            ["cvp@model.weights=a/b", "cvp@model.weights=a_b"],
            [],
            "a/b.* and .*a_b.* would share the folder cvp@",
        ),
        (["cvp"], ["model.weights=a/b,a_b"], "would share the folder"),
    ],
)
def test_invalid_variants_are_refused(methods: list[str], vary: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _labels(methods, vary)


def test_each_source_of_settings_overrides_the_one_below() -> None:
    variant = plan.Variant("cvp", (("training.cycles", "5"),))
    config = plan.settings_of(
        variant,
        "authors",
        {"model.backbone": "a", "data.image_size": 16, "training.batch_size": 8},
        {"model.backbone": "b", "training.batch_size": 16},
        {"model.backbone": "c", "training.cycles": "7", "model.weights": "w.pth"},
    )
    assert (config.model.backbone, config.data.image_size, config.training.batch_size) == (
        "c",
        16,
        16,
    )
    assert config.training.cycles == 5
    assert config.method.num_samples == 32, "the preset's"
    assert config.model.weights == str(Path("w.pth").absolute())


def test_a_method_gets_only_its_own_settings() -> None:
    given = {"method.num_samples": "8"}
    variants = plan.read_variants(["basic", "cvp"])
    plan.check_given(given, variants)
    configs = [plan.settings_of(variant, given=given) for variant in variants]
    assert configs[1].method.num_samples == 8
    assert not hasattr(configs[0].method, "num_samples")
    with pytest.raises(UserError, match="not a setting of basic"):
        plan.check_given(given, variants[:1])
    for name, flag in (
        ("method.name", "--methods"),
        ("training.seed", "--seeds"),
        ("data.source", "--data"),
    ):
        with pytest.raises(UserError, match=f"use {flag}"):
            plan.check_given({name: "1"}, variants)
    with pytest.raises(UserError, match="unknown setting"):
        plan.settings_of(variants[0], given={"training.cycle": 3})


def test_settings_of_single_runs_are_ignored_in_a_file() -> None:
    file = {"data.source": "/a", "data.target": "/b", "training.seed": 3, "method.name": "cvp"}
    config = plan.settings_of(plan.Variant("basic"), file=file)
    assert (config.data.source, config.data.target, config.method_name) == (None, None, "basic")


def test_a_file_for_one_method_gives_others_no_method_settings() -> None:
    file = {"method.name": "can", "method.weight": 0.123, "training.cycles": 3}
    can, dann = (plan.settings_of(plan.Variant(n), file=file) for n in ("can", "dann"))
    assert (can.method.weight, dann.method) == (0.123, type(dann.method)())
    assert can.training.cycles == dann.training.cycles == 3
    given = plan.settings_of(plan.Variant("dann"), file=file, given={"method.weight": "2"})
    assert given.method.weight == 2


def test_a_number_has_one_label_however_it_is_spelled() -> None:
    def label(value: str) -> str:
        return plan.Variant("cvp", (("method.samples_weight", value),)).label.partition("=")[2]

    assert label("0") == label("0.0") == label("0.") == "0"
    assert label("0.50") == "0.5"
    as_they_are = ("100", "1e-3", "1e16", "auto", "nan", "a.0", "1_0.0")
    assert tuple(map(label, as_they_are)) == as_they_are


@pytest.mark.parametrize("weights", ["none", "a file"])
def test_settings_that_a_closed_form_method_changes_are_planned(
    weights: str, tmp_path: Path
) -> None:
    if weights == "a file":
        weights = str(tmp_path / "w.safetensors")
        save_file(SmallCNN().state_dict(), weights)
    given = tiny(method__name="coral", model__weights=weights, model__norm="auto")
    del given["method.name"]
    planned = plan.settings_of(plan.Variant("coral"), given=given)
    assert planned.model.train == ("all" if weights == "none" else "head")
    source = write_domain(tmp_path / "source", 4)
    target = write_domain(tmp_path / "target", 4, seed=1)
    job = plan.BenchmarkJob("A-B", "coral", 0, tmp_path, (source,), target)
    job.settings.parent.mkdir()
    job.settings.write_text(planned.to_yaml())
    certvol.adapt(source, target, job.folder, config=job.settings)
    check_same_settings(job.folder, planned)
    again = read_settings_file(job.folder / "config.yaml")
    assert plan.settings_of(plan.Variant("coral"), file=again) == planned
