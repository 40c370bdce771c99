import dataclasses

import pytest

from certvol.bounds import Bounds, bounded, bounds_of


@pytest.mark.parametrize(
    ("bounds", "within", "outside", "words"),
    [
        (Bounds(above=0), 1e-9, 0, "should be above 0"),
        (Bounds(least=0), 0, -1, "should not be negative"),
        (Bounds(least=4), 4, 3, "should be 4 or more"),
        (Bounds(least=0, below=1), 0.99, 1, "should be below 1"),
        (Bounds(most=0.5), 0.5, 0.6, "should be at most 0.5"),
    ],
)
def test_what_is_within_and_what_is_said_of_the_rest(bounds: Bounds, within: float, outside: float, words: str) -> None:
    assert bounds.fault(within) is None
    assert bounds.fault(outside) == words
    assert bounds.fault(float("nan")) is not None


def test_a_bounded_field_is_an_ordinary_one() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)
        other: int = 3

    assert (Config().weight, Config.weight, Config(weight=2.0).weight) == (1.0, 1.0, 2.0)
    assert dict(bounds_of(Config)) == dict(bounds_of(Config())) == {"weight": Bounds(least=0)}
