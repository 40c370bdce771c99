from dataclasses import replace

import pytest

from certvol.benchmark import claims
from certvol.benchmark.results import Result
from certvol.benchmark.table_formats import markdown
from certvol.benchmark.tables import CLAIM_VERDICTS, claim_table

SMOOTHER = "a smoother boundary: the oscillation is below that of basic"


def _result(method: str, seed: int, last: float, **measured: float) -> Result:
    named = {name.replace("_", " ", 1): value for name, value in measured.items()}
    return Result("A-B", method, seed, "done", last=last, measured=named)


def _runs(gain: float, seeds: int) -> list[Result]:
    """cvp is better than basic by `gain` in every seed, and its oscillation is four fifths."""
    runs = []
    for seed in range(seeds):
        base = 0.5 + 0.01 * seed
        runs.append(_result("basic", seed, base, oscillation=10.0))
        sigma = {"oscillation": 8.0, "correlation_mcd_mu": 0.6}
        runs.append(_result("cvp", seed, base + gain, **sigma))
    return runs


def _verdicts(results: list[Result]) -> dict[str, str]:
    return {claim.words: CLAIM_VERDICTS[test.outcome] for claim, test in claims.find(results)}


def test_verdicts() -> None:
    beats = "cvp beats basic"
    assert _verdicts(_runs(0.03, 6))[beats] == _verdicts(_runs(0.03, 6))[SMOOTHER] == "seen"
    assert _verdicts(_runs(-0.03, 6))[beats] == "not seen: the opposite"
    assert _verdicts(_runs(0.03, 5))[beats] == "undecided: too few runs"
    noisy = [*_runs(0.03, 6)[:-1], _result("cvp", 5, 0.1)]
    assert _verdicts(noisy)[beats] == "undecided at this noise"
    smoother = next(test for claim, test in claims.find(noisy) if claim.words == SMOOTHER)
    assert len(smoother.differences) == 5, "one run has no oscillation"


def test_only_claims_with_runs_are_tested() -> None:
    found = {claim.words: test.differences for claim, test in claims.find(_runs(0.03, 2))}
    assert found["cvp beats basic"] == pytest.approx([3.0, 3.0])
    assert found[SMOOTHER] == pytest.approx([20.0, 20.0])
    assert not any("source only" in words for words in found)
    assert claims.find([]) == []


def test_the_table_shows_effects_with_their_direction() -> None:
    text = markdown([claim_table(claims.find(_runs(0.03, 6)))])
    assert "| (b) cvp beats basic | +3.0 ± 0.0 points | 6 | 0.031 | seen |" in text
    assert "| 20.0 ± 0.0 % less | 6 |" in text
    assert "mean of MC-dropout (MCD_mu), Pearson's r | +0.60 ± 0.00 | 6 |" in text
    rougher = [
        replace(run, measured={"oscillation": 8.0 if run.method == "basic" else 10.0})
        for run in _runs(0.03, 6)
    ]
    text = markdown([claim_table(claims.find(rougher))])
    assert "| 25.0 ± 0.0 % more | 6 | 0.031 | not seen: the opposite |" in text
