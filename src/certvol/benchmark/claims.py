"""Test the paper's claims on the runs of a benchmark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from certvol.benchmark.results import Result
from certvol.benchmark.significance import PairedTest
from certvol.scores.uncertainty import COMPARED_WITH_SIGMA, MEASURES

FULL, BASIC, SOURCE = "cvp", "basic", "source_only"
WITHOUT_SAMPLES = "cvp@method.samples_weight=0"


@dataclass(frozen=True)
class Claim:
    letter: str
    words: str
    unit: str
    """The unit of the mean effect."""
    needs: tuple[str, ...]
    """The methods whose runs are the arguments of `effect`, in this order."""
    effect: Callable[..., float]
    """The effect for one task and seed; positive supports the claim. KeyError if unknown."""
    digits: int = 1


def _gain(words: str, letter: str, method: str, over: str) -> Claim:
    def effect(own: Result, other: Result) -> float:
        if own.last is None or other.last is None:
            raise KeyError("last")
        return 100 * (own.last - other.last)

    return Claim(letter, words, "points", (method, over), effect)


def _correlation(measure: str) -> Claim:
    words = f"sigma correlates with certainty by: {MEASURES[measure].title}, Pearson's r"
    name = f"correlation {measure}"
    return Claim("d", words, "", (FULL,), lambda own: own.measured[name], digits=2)


def _percent(words: str, letter: str, unit: str, name: str) -> Claim:
    return Claim(letter, words, unit, (FULL,), lambda own: 100 * own.measured[name])


CLAIMS = (
    _gain("adaptation beats source only", "a", FULL, SOURCE),
    _gain("cvp beats basic", "b", FULL, BASIC),
    _gain("the antagonistic loss alone beats basic", "b", WITHOUT_SAMPLES, BASIC),
    _gain("the samples loss adds to it", "b", FULL, WITHOUT_SAMPLES),
    Claim(
        "c",
        "a smoother boundary: the oscillation is below that of basic",
        "% less",
        (FULL, BASIC),
        lambda own, other: 100 * (1 - own.measured["oscillation"] / other.measured["oscillation"]),
    ),
    *map(_correlation, COMPARED_WITH_SIGMA),
    Claim(
        "d",
        "sigma is excessive without the samples loss (median over the target)",
        "% more",
        (WITHOUT_SAMPLES, FULL),
        lambda without, full: 100 * (without.measured["sigma"] / full.measured["sigma"] - 1),
    ),
    _percent("sigma of the source drops when adaptation starts", "e", "% less", "drop source"),
    _percent(
        "the target's sigma then falls below the source's sigma before adaptation",
        "e",
        "% less",
        "drop target",
    ),
    _percent(
        "the source's sigma recovers sooner than the target's",
        "e",
        "% of adaptation sooner",
        "lead of source",
    ),
)


def find(done: Sequence[Result]) -> list[tuple[Claim, PairedTest]]:
    """Test each claim for which there are runs, over pairs of the same task and seed."""
    runs = {result.key: result for result in done}
    pairs = list(dict.fromkeys((result.task, result.seed) for result in done))
    findings = []
    for claim in CLAIMS:
        effects = {}
        for task, seed in pairs:
            try:
                own = [runs[task, method, seed] for method in claim.needs]
                effects[task, seed] = claim.effect(*own)
            except (KeyError, ZeroDivisionError):
                continue
        if effects:
            findings.append((claim, PairedTest(effects)))
    return findings
