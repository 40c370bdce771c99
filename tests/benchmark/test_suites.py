import pytest

from certvol.benchmark import suites
from certvol.errors import UserError


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_is_consistent(name: str) -> None:
    suite = suites.SUITES[name]
    for task in suite.all_tasks:
        assert suite.domains_of(task) is not None, task
    for domain in suite.domains:
        assert not suite.class_names or set(domain.classes) <= set(suite.class_names)
        assert len(set(domain.classes)) == len(domain.classes) < suite.classes
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
    for variant, tasks in suite.variants.items():
        assert f"--variant {variant}: {' '.join(tasks)}" in joined
    for words in (" ".join(suite.tasks), str(suite.classes), suite.backbone, suite.where):
        assert words in joined
    for domain in suite.domains:
        assert f"{domain.letter} {domain.folders[0]}" in joined
        assert all(other in joined for other in domain.folders)
        assert domain.images is None or f"{domain.images:,} images" in joined
    assert suite.archive_sha256 is None or suite.archive_sha256 in joined


@pytest.mark.parametrize(
    ("suite", "asked", "variant", "expected"),
    [
        ("office-31", None, None, ["A-W", "D-W", "W-D", "A-D", "D-A", "W-A"]),
        ("office-31", ["W-A", "A-W", "W-A"], None, ["W-A", "A-W"]),
        ("visda-2017", None, "validation", ["synthetic-validation"]),
        ("visda-2017", None, None, ["synthetic-test"]),
        ("visda-2017", None, "partial", ["synthetic-validation6"]),
        ("office-31", ["A-W10", "A-W"], None, ["A-W10", "A-W"]),
        ("office-31", None, "multi-source", ["D+W-A", "A+W-D", "A+D-W"]),
        ("office-31", ["W+A-D10"], None, ["W+A-D10"]),
        ("digits", ["I-R"], None, ["I-R"]),
    ],
)
def test_tasks(
    suite: str, asked: list[str] | None, variant: str | None, expected: list[str]
) -> None:
    assert suites.find_tasks(suites.SUITES[suite], asked, variant) == expected


@pytest.mark.parametrize(
    ("suite", "asked", "variant", "said"),
    [
        ("office-31", ["A-X"], None, "no task `A-X`"),
        ("office-31", ["A-A"], None, "two domains"),
        ("office-31", ["AW"], None, "SOURCE-TARGET"),
        ("office-31", ["W-W10"], None, "two domains"),
        ("office-31", ["W10-A"], None, "no task"),
        ("office-31", ["A+W-W"], None, "SOURCE[+]SOURCE-TARGET"),
        ("office-31", ["A+A-W"], None, "no task"),
        ("office-31", ["A+W10-D"], None, "no task"),
        ("office-31", ["A+-D"], None, "no task"),
        ("adaptiope", None, "test", "use --tasks"),
        ("office-31", None, "partly", "did you mean `partial`"),
        ("visda-2017", None, "validating", "did you mean `validation`"),
        ("visda-2017", ["synthetic-test"], "test", "not both"),
    ],
)
def test_invalid_tasks_are_refused(
    suite: str, asked: list[str] | None, variant: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        suites.find_tasks(suites.SUITES[suite], asked, variant)


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `office-31`"):
        suites.find_suite("office31")


def test_partial_variants_are_the_usual_ones() -> None:
    office, home, visda = (suites.SUITES[n] for n in ("office-31", "office-home", "visda-2017"))
    assert office.variants["partial"][0] == "A-W10"
    assert office.classes_of("A-W10") == suites.CALTECH_CLASSES
    assert len(home.variants["partial"]) == 12
    first = home.classes_of("A-C25")
    assert list(first) == sorted(first)
    assert (first[0], first[-1], len(first)) == ("Alarm_Clock", "Fork", 25)
    assert visda.classes_of("synthetic-validation6")[-1] == "knife"
    assert len(visda.classes_of("synthetic-validation")) == 12


def test_domainnet_has_the_usual_pairs_and_all() -> None:
    domainnet = suites.SUITES["domainnet"]
    assert (len(domainnet.tasks), len(domainnet.variants["all"])) == (12, 30)
