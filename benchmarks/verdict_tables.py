"""The tables of `verdicts.py`: evidence of many runs, judged by the present code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOOD, BETWEEN, POOR = "good", "between", "poor or harmed"  # what can become of a run
HARM = 0.05  # accuracy that adaptation may lose before it counts as harmed


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
    from certvol.predict.estimates import Evidence

    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}

    def part(prefix: str) -> dict[str, NDArray[Any]]:
        return {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

    evidence = Evidence(**part("evidence_"))
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
    from certvol.predict.estimates import estimates, target_accuracy

    found = [estimates(run.evidence) for run in runs]
    found = [{"as shown": target_accuracy(each), **each} for each in found]
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


def fate(accuracy: float, before: float, after: float) -> str:
    """Say what became of a run: its accuracy on all images, and whether adaptation did harm.

    `before` and `after` are accuracies on the images of known classes.
    """
    from certvol.predict.verdict import GOOD_ENOUGH, TOO_POOR

    if accuracy < TOO_POOR or after < before - HARM:
        return POOR
    return GOOD if accuracy >= GOOD_ENOUGH else BETWEEN


def happened(run: Judged) -> str:
    return fate(run.after_all, run.before, run.after)


def verdict_table(runs: Sequence[Judged]) -> str:
    """Count verdicts by what happened, and the share that is right, over all runs and by group."""
    from certvol.predict.verdict import WORDS, make_verdict

    words = [make_verdict(run.evidence, _names(run))["verdict"] for run in runs]
    truths = [happened(run) for run in runs]
    rows = []
    for word in WORDS:
        counts = [
            sum((word, truth) == pair for pair in zip(words, truths, strict=True))
            for truth in (GOOD, BETWEEN, POOR)
        ]
        own = [run for each, run in zip(words, runs, strict=True) if each == word]
        true = [f"{100 * np.mean([run.after_all for run in own]):.1f}" if own else "–"]
        harm = [str(sum(run.after < run.before - HARM for run in own))]
        rows.append([word, *map(str, counts), *true, *harm])
    first = markdown(["verdict", GOOD, BETWEEN, POOR, "mean accuracy, %", "harmed"], rows)
    expected = dict(zip(WORDS, (GOOD, BETWEEN, POOR), strict=True))
    hits = [expected[word] == truth for word, truth in zip(words, truths, strict=True)]
    trusted = [(word == WORDS[0], truth == GOOD) for word, truth in zip(words, truths, strict=True)]
    rows = []
    for kind in ("suite", "condition", "variant"):
        for name in sorted({getattr(run, kind) for run in runs}):
            chosen = [i for i, run in enumerate(runs) if getattr(run, kind) == name]
            used = [trusted[i][1] for i in chosen if trusted[i][0]]
            row = [kind, name, str(len(chosen)), _share([hits[i] for i in chosen]), _share(used)]
            rows.append(row)
    total = [
        "all",
        "",
        str(len(runs)),
        _share(hits),
        _share([good for use, good in trusted if use]),
    ]
    columns = ["group", "", "runs", "right verdicts, %", "`use it` is right, %"]
    return f"{first}\n\n{markdown(columns, [total, *rows])}"


def _share(flags: Sequence[bool]) -> str:
    return f"{100 * np.mean(flags):.0f} ({len(flags)})" if flags else "–"


def _names(run: Judged) -> list[str]:
    return [str(i) for i in range(run.evidence.num_classes)]


def calibration_table(runs: Sequence[Judged]) -> str:
    """Mean expected calibration error of both models, raw and at their temperatures, by suite."""
    from certvol.predict.verdict import make_verdict
    from certvol.scores.calibration import at_temperature
    from certvol.scores.metrics import calibration_error, reliability

    def error(run: Judged, p_KC: NDArray[np.floating[Any]], temperature: float = 1.0) -> float:
        scaled_KC = at_temperature(p_KC, temperature)
        right_K = scaled_KC.argmax(axis=1) == run.true_N[run.shown_K]
        return calibration_error(reliability(scaled_KC.max(axis=1), right_K))

    errors = []
    for run in runs:
        found = make_verdict(run.evidence, _names(run))["temperature"]
        before_KC, after_KC = run.evidence.before_NC, run.evidence.after_NC
        errors.append(
            [
                error(run, before_KC),
                error(run, before_KC, found["pretrained"]),
                error(run, after_KC),
                error(run, after_KC, found["pretrained"]),
                error(run, after_KC, found["delivered"]),
            ]
        )
    rows = []
    for suite in ("all", *sorted({run.suite for run in runs})):
        own = [e for e, run in zip(errors, runs, strict=True) if suite in ("all", run.suite)]
        rows.append([suite, str(len(own)), *(f"{mean:.3f}" for mean in np.mean(own, axis=0))])
    columns = ["before: raw", "on source", "adapted: raw", "source's T", "as delivered"]
    return markdown(["suite", "runs", *columns], rows)


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
    """Measures of the shown images, higher is more certain, and means of ranks of some.

    They are those of the delivered model at its temperature, as predictions.csv has them.
    """
    import torch
    from scipy.stats import rankdata

    from certvol.predict.forward import certainty
    from certvol.predict.verdict import make_verdict
    from certvol.scores.calibration import logits_of
    from certvol.scores.uncertainty import logit_measures

    temperature = make_verdict(run.evidence, _names(run))["temperature"]["delivered"]
    scaled = torch.from_numpy(logits_of(run.evidence.after_NC) / temperature)
    values = {name: values_N[run.shown_K] for name, values_N in run.measures.items()}
    for name in ("probability", "entropy"):
        values[f"{name}, raw"] = values[name]
        values[name] = logit_measures(scaled)[name].numpy()
    found = {
        name: certainty(name.partition(",")[0], values_K).astype(np.float64)
        for name, values_K in values.items()
    }
    for names in COMBINED:
        if set(names) <= set(found):
            found["+".join(names)] = np.mean([rankdata(found[name]) for name in names], axis=0)
    return found


def measure_table(runs: Sequence[Judged]) -> str:
    """Mean AUROC of finding errors and unknown classes by measure, overall and by suite.

    Only runs with sigma count. `either` is wrong or unknown; `beats sigma` is the share of runs.
    """
    from certvol.scores.metrics import auroc

    cells: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if "sigma" not in run.measures:
            continue
        true_K = run.true_N[run.shown_K]
        known_K, right_K = true_K >= 0, run.evidence.after_NC.argmax(axis=1) == true_K
        for name, values_K in certainties(run).items():
            row = cells.setdefault(name, {})
            found = {
                "errors": auroc(values_K[known_K], right_K[known_K]),
                "unknown": auroc(values_K, known_K),
                "either": auroc(values_K, right_K),
            }
            for column, value in found.items():
                row.setdefault(column, []).append(value)
                if column != "either":
                    row.setdefault(f"{column}, {run.suite}", []).append(value)
    columns = sorted({column for row in cells.values() for column in row})
    columns = [c for c in columns if np.isfinite(cells["sigma"].get(c, [])).any()]
    rows = []
    for name, row in cells.items():
        better = [
            np.greater(row[c], cells["sigma"][c])[np.isfinite(cells["sigma"][c])]
            for c in ("errors", "unknown")
        ]
        wins = [f"{100 * flags.mean():.0f}" if len(flags) else "–" for flags in better]
        means = (f"{np.nanmean(row[c]):.3f} ({np.isfinite(row[c]).sum()})" for c in columns)
        rows.append([name, *means, *wins])
    ends = [f"beats sigma for {kind}, %" for kind in ("errors", "unknown")]
    return markdown(["measure", *columns, *ends], rows)


def tables(runs: Sequence[tuple[str, dict[str, Any], Path]]) -> str:
    judged = [read(*run) for run in runs]
    if not judged:
        return "no runs yet"
    parts = (verdict_table, estimator_table, calibration_table, measure_table)
    return "\n\n".join([f"{len(judged)} runs", *(part(judged) for part in parts)])
