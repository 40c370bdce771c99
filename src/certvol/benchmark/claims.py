"""The paper's claims, each tested on the runs of a benchmark: seen, not seen, or undecided at this noise."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from certvol.benchmark.results import Result
from certvol.benchmark.statistics import SIGNIFICANT, least_p, sign_flip_p, tasks_p
from certvol.uncertainty import COMPARED_WITH_SIGMA, MEASURES

FULL, BASIC, SOURCE = "cvp", "basic", "source_only"
WITHOUT_SAMPLES = "cvp@method.samples_weight=0"


@dataclass(frozen=True)
class Claim:
    letter: str
    words: str
    unit: str
    """Of the mean that is shown."""
    needs: tuple[str, ...]
    """Methods, in the order that `effect` takes their runs."""
    effect: Callable[..., float]
    """Of one task and seed, positive where it speaks for the claim. KeyError where a run does not tell."""
    digits: int = 1


def _gain(over: str, words: str, letter: str, method: str = FULL) -> Claim:
    def effect(own: Result, other: Result) -> float:
        return 100 * (_accuracy(own) - _accuracy(other))

    return Claim(letter, words, "points", (method, over), effect)


def _accuracy(result: Result) -> float:
    if result.last is None:
        raise KeyError("accuracy")
    return result.last


def _correlation(measure: str) -> Claim:
    title = MEASURES[measure].title
    words = f"sigma correlates with certainty by: {title}, Pearson's r"
    return Claim("d", words, "", (FULL,), lambda own: own.facts[f"correlation {measure}"], digits=2)


CLAIMS = (
    _gain(SOURCE, "adaptation beats source only", "a"),
    _gain(BASIC, "cvp beats basic", "b"),
    _gain(BASIC, "the antagonistic loss alone beats basic", "b", WITHOUT_SAMPLES),
    _gain(WITHOUT_SAMPLES, "the samples loss adds to it", "b"),
    Claim(
        "c",
        "a smoother boundary: the oscillation is below that of basic",
        "% less",
        (FULL, BASIC),
        lambda own, other: 100 * (1 - own.facts["oscillation"] / other.facts["oscillation"]),
    ),
    *map(_correlation, COMPARED_WITH_SIGMA),
    Claim(
        "d",
        "sigma is excessive without the samples loss (median over the target)",
        "% more",
        (WITHOUT_SAMPLES, FULL),
        lambda without, full: 100 * (without.facts["sigma"] / full.facts["sigma"] - 1),
    ),
    Claim(
        "e",
        "sigma of the source drops when adaptation starts",
        "% less",
        (FULL,),
        lambda own: 100 * own.facts["drop source"],
    ),
    Claim(
        "e",
        "sigma of the target is then below that of the source before",
        "% less",
        (FULL,),
        lambda own: 100 * own.facts["drop target"],
    ),
    Claim(
        "e",
        "the source's recovers sooner than the target's",
        "% of adaptation sooner",
        (FULL,),
        lambda own: 100 * own.facts["lead of source"],
    ),
)


@dataclass(frozen=True)
class Finding:
    claim: Claim
    by_pair: dict[tuple[str, int], float]
    """The effect by task and seed, of those that tell."""

    @property
    def effects(self) -> list[float]:
        return list(self.by_pair.values())

    @property
    def p(self) -> float:
        return sign_flip_p(self.effects)

    @property
    def p_over_tasks(self) -> float | None:
        return tasks_p(self.by_pair)

    @property
    def verdict(self) -> str:
        if not self.effects:
            return "not tested"
        if least_p(len(self.effects)) >= SIGNIFICANT:
            return "undecided: too few runs"
        if self.p >= SIGNIFICANT:
            return "undecided at this noise"
        return "seen" if statistics.fmean(self.effects) > 0 else "not seen: the opposite"


def find(done: Sequence[Result]) -> list[Finding]:
    """Each claim for which there are runs, over pairs of the same task and seed."""
    runs = {result.key: result for result in done}
    pairs = list(dict.fromkeys((result.task, result.seed) for result in done))
    findings = []
    for claim in CLAIMS:
        effects = {}
        for task, seed in pairs:
            own = [runs.get((task, method, seed)) for method in claim.needs]
            try:
                if None not in own:
                    effects[task, seed] = claim.effect(*own)
            except (KeyError, ZeroDivisionError):
                continue
        if effects:
            findings.append(Finding(claim, effects))
    return findings
