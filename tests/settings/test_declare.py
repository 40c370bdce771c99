import dataclasses

import pytest

from certvol.settings import WITHOUT_EFFECT, Range, setting, settings_of


@pytest.mark.parametrize(
    ("limits", "within", "outside", "words"),
    [
        (Range(above=0), 1e-9, 0, "should be above 0"),
        (Range(at_least=0), 0, -1, "should not be negative"),
        (Range(at_least=4), 4, 3, "should be 4 or more"),
        (Range(at_least=0, below=1), 0.99, 1, "should be below 1"),
        (Range(at_most=0.5), 0.5, 0.6, "should be at most 0.5"),
    ],
)
def test_a_value_outside_the_range_is_described(
    limits: Range, within: float, outside: float, words: str
) -> None:
    assert limits.fault(within) is None
    assert limits.fault(outside) == words
    assert limits.fault(float("nan")) is not None


def test_a_declared_setting_is_an_ordinary_dataclass_field() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = setting(1.0, at_least=0, help="Weight of the loss.")

    assert (Config().weight, Config.weight, Config(weight=2.0).weight) == (1.0, 1.0, 2.0)
    assert list(settings_of(Config)) == list(settings_of(Config()))
    (declared,) = settings_of(Config)
    assert (declared.name, declared.default, declared.help) == (
        "weight",
        1.0,
        "Weight of the loss.",
    )
    assert declared.range == Range(at_least=0)


def test_a_plain_field_is_a_setting_without_help_and_range() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = 1.0

    (declared,) = settings_of(Config)
    assert (declared.help, declared.range, declared.affects_result) == ("", Range(), True)


def test_a_setting_says_whether_it_affects_the_result() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        cycles: int = setting(1, help="Cycles.")
        workers: int = setting(1, affects_result=False, help="Processes.")

    assert [each.affects_result for each in settings_of(Config)] == [True, False]
    assert {"data.workers", "training.device", "guard.keep"} <= WITHOUT_EFFECT
    assert not {"data.max_megapixels", "data.target_prior", "training.seed"} & WITHOUT_EFFECT
