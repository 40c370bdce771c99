import pytest

from certvol.progress import duration, percent


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7199, "120 min"), (19_080, "5.3 h")],
)
def test_long_durations_are_in_minutes_and_hours(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_percent_has_one_decimal_and_no_sign() -> None:
    assert (percent(0.875), percent(0.05432, 2), percent(1.0), percent(None)) == (
        "87.5", "5.43", "100.0", "",
    )  # fmt: skip
