"""The tables of `verdicts.py`: evidence of many runs, judged by the present code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Judged:
    """A run, what is true of it, and its evidence."""

    key: str
    line: dict[str, Any]
    evidence: Any
    true_N: NDArray[np.int64]
    """-1 for an image of an unknown class."""
    predicted_N: NDArray[np.int64]
    shown_K: NDArray[np.int64]
    measures: dict[str, NDArray[np.float32]]

    @property
    def suite(self) -> str:
        return self.key.split("/")[0]

    @property
    def condition(self) -> str:
        return self.key.split("/")[2]

    @property
    def variant(self) -> str:
        return self.key.split("/")[3]

    @property
    def known_K(self) -> NDArray[np.int64]:
        """Which of the shown images are of known classes."""
        return np.flatnonzero(self.true_N[self.shown_K] >= 0)

    def accuracy(self, probabilities_KC: NDArray[np.float32], known: bool = True) -> float:
        right_K = probabilities_KC.argmax(axis=1) == self.true_N[self.shown_K]
        return float((right_K[self.known_K] if known else right_K).mean())

    @property
    def before(self) -> float:
        return self.accuracy(self.evidence.before_NC)

    @property
    def after(self) -> float:
        return self.accuracy(self.evidence.after_NC)

    @property
    def after_all(self) -> float:
        """Unknown images count as wrong: no prediction for them is right."""
        return self.accuracy(self.evidence.after_NC, known=False)


def read(key: str, line: dict[str, Any], file: Path) -> Judged:
    from certvol.predict.evidence import Evidence

    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}

    def part(prefix: str) -> dict[str, NDArray[Any]]:
        return {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

    evidence = Evidence.from_arrays(part("evidence_"))
    return Judged(
        key,
        line,
        evidence,
        arrays["true_N"],
        arrays["predicted_N"],
        arrays["shown_K"],
        part("measure_"),
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join(head + ["| " + " | ".join(row) + " |" for row in rows])


def estimator_table(runs: Sequence[Judged]) -> str:
    """Mean absolute error of every estimator, in points, by suite."""
    from certvol.predict.estimates import estimates

    found = [estimates(run.evidence) for run in runs]
    truth = np.array([run.after_all for run in runs])
    suites = sorted({run.suite for run in runs})
    rows = []
    for name in found[0]:
        row = [name]
        for suite in (None, *suites):
            errors = [
                abs(value - true)
                for each, true, run in zip(found, truth, runs, strict=True)
                if suite in (None, run.suite) and (value := each[name]) is not None
            ]
            row.append(f"{100 * np.mean(errors):.1f} ({len(errors)})" if errors else "–")
        rows.append(row)
    return markdown(["estimator", "all", *suites], rows)


COMBINED = (
    ("sigma", "probability"),
    ("sigma", "entropy"),
    ("sigma", "mcd_mu"),
    ("sigma", "logit"),
    ("logit", "probability"),
    ("mcd_mu", "probability"),
    ("sigma", "probability", "mcd_mu"),
)


def certainties(run: Judged) -> dict[str, NDArray[np.floating[Any]]]:
    """Measures turned so that higher is more certain, and means of ranks of some."""
    from scipy.stats import rankdata

    from certvol.predict.forward import certainty

    found: dict[str, NDArray[np.floating[Any]]] = {
        name: certainty(name, values_N) for name, values_N in run.measures.items()
    }
    for names in COMBINED:
        if set(names) <= set(found):
            found["+".join(names)] = np.mean([rankdata(found[name]) for name in names], axis=0)
    return found


def measure_table(runs: Sequence[Judged]) -> str:
    """Mean AUROC of finding errors, unknown classes, and either, by measure."""
    from certvol.scores.metrics import auroc

    cells: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if "sigma" not in run.measures:
            continue
        known_N = run.true_N >= 0
        right_N = run.predicted_N == run.true_N
        for name, values_N in certainties(run).items():
            row = cells.setdefault(name, {})
            row.setdefault("errors", []).append(auroc(values_N[known_N], right_N[known_N]))
            row.setdefault(f"errors, {run.suite}", []).append(row["errors"][-1])
            row.setdefault("unknown", []).append(auroc(values_N, known_N))
            row.setdefault("either", []).append(auroc(values_N, right_N))
    columns = sorted({column for row in cells.values() for column in row})
    rows = [
        [name, *(f"{np.nanmean(row[c]):.3f} ({np.isfinite(row[c]).sum()})" for c in columns)]
        for name, row in cells.items()
    ]
    return markdown(["measure", *columns], rows)


def tables(runs: Sequence[tuple[str, dict[str, Any], Path]]) -> str:
    judged = [read(*run) for run in runs]
    if not judged:
        return "no runs yet"
    return "\n\n".join([f"{len(judged)} runs", estimator_table(judged), measure_table(judged)])
