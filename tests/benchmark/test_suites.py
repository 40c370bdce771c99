import pytest

from certvol.benchmark import suites
from certvol.errors import UserError


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_is_consistent(name: str) -> None:
    suite = suites.SUITES[name]
    for task in [*suite.tasks, *suite.splits.values()]:
        assert set(task.split("-")) <= set(suite.letters)
        assert task.count("-") == 1
    assert suite.tasks
    assert len(set(suite.tasks)) == len(suite.tasks)
    assert not suite.class_names or len(set(suite.class_names)) == suite.classes
    assert set(suite.class_aliases.values()) <= set(suite.class_names)


@pytest.mark.parametrize("name", suites.SUITES)
def test_a_suite_is_described_in_short_lines(name: str) -> None:
    suite, text = suites.SUITES[name], suites.describe(suites.SUITES[name])
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert joined.startswith(f"{name}: {suite.summary}")
    for words in (" ".join(suite.tasks), str(suite.classes), suite.backbone, suite.where):
        assert words in joined
    for domain in suite.domains:
        assert f"{domain.letter} {domain.folders[0]}" in joined
        assert all(other in joined for other in domain.folders)
        assert domain.images is None or f"{domain.images:,} images" in joined
    assert suite.archive_sha256 is None or suite.archive_sha256 in joined


@pytest.mark.parametrize(
    ("suite", "asked", "split", "expected"),
    [
        ("office-31", None, None, ["A-W", "D-W", "W-D", "A-D", "D-A", "W-A"]),
        ("office-31", ["W-A", "A-W", "W-A"], None, ["W-A", "A-W"]),
        ("visda-2017", None, "validation", ["synthetic-validation"]),
        ("visda-2017", None, None, ["synthetic-test"]),
        ("digits", ["I-R"], None, ["I-R"]),
    ],
)
def test_tasks(suite: str, asked: list[str] | None, split: str | None, expected: list[str]) -> None:
    assert suites.find_tasks(suites.SUITES[suite], asked, split) == expected


@pytest.mark.parametrize(
    ("suite", "asked", "split", "said"),
    [
        ("office-31", ["A-X"], None, "no task `A-X`"),
        ("office-31", ["A-A"], None, "two domains"),
        ("office-31", ["AW"], None, "SOURCE-TARGET"),
        ("office-31", None, "test", "use --tasks"),
        ("visda-2017", None, "validating", "did you mean `validation`"),
        ("visda-2017", ["synthetic-test"], "test", "not both"),
    ],
)
def test_invalid_tasks_are_refused(
    suite: str, asked: list[str] | None, split: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        suites.find_tasks(suites.SUITES[suite], asked, split)


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `office-31`"):
        suites.find_suite("office31")
