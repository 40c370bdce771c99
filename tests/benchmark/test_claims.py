import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certvol.benchmark import claims
from certvol.benchmark.facts import read_facts, sigma_course
from certvol.benchmark.results import Result
from certvol.benchmark.tables import claim_table, markdown
from certvol.training.run_folder import RunFolder
from certvol.uncertainty import COMPARED_WITH_SIGMA


def history(source: list[float], target: list[float], before: float = 2.0) -> list[dict[str, Any]]:
    """Two lines a cycle, ten steps a line."""
    lines = [
        {
            "phase": "pretrain",
            "cycle": 0,
            "step": step,
            "sigma_source": 9.0 if step <= 50 else before,
            "sigma_target": None,
        }
        for step in range(10, 101, 10)
    ]
    for i, (one, other) in enumerate(zip(source, target, strict=True)):
        line = {"phase": "adapt", "cycle": 1 + i // 2, "step": 10 * (i + 1)}
        lines.append({**line, "sigma_source": one, "sigma_target": other})
    return lines


def test_the_course_of_sigma_by_hand() -> None:
    facts = sigma_course(history([1.0, 1.5, 2.0, 3.0], [0.5, 0.7, 1.0, 2.0]))
    assert facts["drop source"] == pytest.approx(1 - 1.25 / 2)
    assert facts["drop target"] == pytest.approx(1 - 0.6 / 2)
    assert facts["lead of source"] == pytest.approx(1.0 - 0.75)


def test_a_sigma_that_never_falls_or_never_returns() -> None:
    facts = sigma_course(history([2.0, 2.5, 3.0, 3.0], [1.0, 1.0, 1.0, 1.9]))
    assert facts["drop source"] < 0
    assert facts["lead of source"] == 1.0  # at once, against never
    assert sigma_course(history([3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 1.0, 2.0]))["lead of source"] == pytest.approx(0.25)


def test_runs_without_sigma_or_adaptation_have_no_course() -> None:
    without = [{key: None if "sigma" in key else value for key, value in line.items()} for line in history([1], [1])]
    assert sigma_course(without) == {}
    assert sigma_course(history([], [])) == {}
    assert sigma_course(history([1.0], [1.0], before=0.0)) == {}
    assert sigma_course([]) == {}


def test_facts_of_a_run_and_of_one_that_tells_nothing(tmp_path: Path) -> None:
    assert read_facts(RunFolder(tmp_path)) == {}
    pearson = {name: 0.9 - 0.1 * i for i, name in enumerate(COMPARED_WITH_SIGMA)}
    found = {
        "oscillation": {"total": 12.5},
        "correlations": {"pearson": pearson},
        "measures": {"sigma": {"median": 1.5}},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    facts = read_facts(RunFolder(tmp_path))
    correlations = {f"correlation {name}": value for name, value in pearson.items()}
    assert facts == pytest.approx({"oscillation": 12.5, "sigma": 1.5, **correlations})
    found = {"correlations": None, "measures": {"probability": {"median": 0.5}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    assert read_facts(RunFolder(tmp_path)) == {}


def result(method: str, seed: int, last: float, **facts: float) -> Result:
    return Result(
        "A-B",
        method,
        seed,
        "accuracy",
        "",
        "done",
        last=last,
        facts={k.replace("_", " ", 1): v for k, v in facts.items()},
    )


def runs(gain: float, seeds: int) -> list[Result]:
    """cvp is better than basic by `gain` in every seed, and its oscillation is four fifths."""
    return [
        run
        for seed in range(seeds)
        for run in (
            result("basic", seed, 0.5 + 0.01 * seed, oscillation=10.0),
            result("cvp", seed, 0.5 + gain + 0.01 * seed, oscillation=8.0, correlation_mcd_mu=0.6),
        )
    ]


def verdicts(results: list[Result]) -> dict[str, str]:
    return {finding.claim.words: finding.verdict for finding in claims.find(results)}


def test_verdicts() -> None:
    beats, smoother = "cvp beats basic", "a smoother boundary: the oscillation is below that of basic"
    assert verdicts(runs(0.03, 6))[beats] == verdicts(runs(0.03, 6))[smoother] == "seen"
    assert verdicts(runs(-0.03, 6))[beats] == "not seen: the opposite"
    assert verdicts(runs(0.03, 5))[beats] == "undecided: too few runs"
    noisy = [*runs(0.03, 6)[:-1], result("cvp", 5, 0.1)]
    assert verdicts(noisy)[beats] == "undecided at this noise"
    assert len(next(f for f in claims.find(noisy) if f.claim.words == smoother).effects) == 5  # that run has none


def test_only_claims_with_runs_are_there_and_their_figures_are_means() -> None:
    found = {finding.claim.words: finding.effects for finding in claims.find(runs(0.03, 2))}
    assert found["cvp beats basic"] == pytest.approx([3.0, 3.0])
    assert found["a smoother boundary: the oscillation is below that of basic"] == pytest.approx([20.0, 20.0])
    assert not any("source only" in words for words in found)
    assert claims.find([]) == []
    text = markdown([claim_table(claims.find(runs(0.03, 6)))])
    assert "| (b) cvp beats basic | +3.0 ± 0.0 points | 6 | 0.031 | seen |" in text
    assert "| 20.0 ± 0.0 % less | 6 |" in text
    rougher = [replace(r, facts={"oscillation": 8.0 if r.method == "basic" else 10.0}) for r in runs(0.03, 6)]
    assert "| 25.0 ± 0.0 % more | 6 | 0.031 | not seen: the opposite |" in markdown([claim_table(claims.find(rougher))])
    assert "mean of MC-dropout (MCD_mu), Pearson's r | +0.60 ± 0.00 | 6 |" in text
