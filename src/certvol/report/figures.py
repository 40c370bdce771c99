"""The figures of a run's report.

To add a figure, write a function that turns a record into a chart, and list it in `SECTIONS`: the
page and the figures for papers then both show it. Charts without content are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from certvol.report.charts import (
    Axis,
    Bars,
    Chart,
    Line,
    Lines,
    Mark,
    Matrix,
    Reliability,
    ReliabilityBin,
    Series,
    line,
)
from certvol.report.records import MEASURES, Record, number, numbers, section
from certvol.scores import uncertainty

LEAST_COVERAGE = 0.05  # of the curves of errors
_LOSSES = {"loss": "total", "ce": "cross-entropy", "samples_ce": "cross-entropy of the samples"}
_NOT_LOSSES = {"phase", "cycle", "step", "lr", "sigma_source", "sigma_target"}


def measure_title(name: str) -> str:
    return uncertainty.MEASURES[name].title if name in uncertainty.MEASURES else name


# --- certainty ---


def risk_line(record: Record, measure: str, name: str, role: str) -> Line:
    curve = section(record.evaluation, "risk_coverage", measure)
    pairs = zip(numbers(curve.get("coverage")), numbers(curve.get("risk")), strict=False)
    # Among the first few images one error is a large share, which would set the scale of the chart.
    return line(
        name, role, [(share, risk) for share, risk in pairs if (share or 0) >= LEAST_COVERAGE]
    )


def risk_chart(lines: list[Line], caption: str) -> Lines:
    return Lines(
        id="risk-coverage",
        title="Errors among accepted images",
        caption=f"{caption} Lower is better.",
        x=Axis("share of images accepted", percent=True, low=0.0, high=1.0),
        y=Axis("share wrong", percent=True, low=0.0),
        lines=lines,
    )


def risk_coverage(record: Record) -> Lines:
    names = [name for name in MEASURES if section(record.evaluation, "risk_coverage", name)]
    return risk_chart(
        [risk_line(record, name, measure_title(name), str(i)) for i, name in enumerate(names)],
        "If you accept only the images that a measure ranks as most certain, this share of them is "
        "wrong.",
    )


def reliability(record: Record) -> Reliability:
    found = section(record.evaluation).get("reliability")
    keys = ("lower", "upper", "confidence", "accuracy", "images")
    entries = [section(entry) for entry in found] if isinstance(found, list) else []
    known = [[value for k in keys if (value := number(e.get(k))) is not None] for e in entries]
    ece = number(section(record.evaluation).get("ece"))
    calibration = "" if ece is None else f" The expected calibration error is {ece:.3f}."
    return Reliability(
        id="reliability",
        title="Reliability of the probability",
        caption="On the diagonal, images with a probability of 80 % are right 80 % of the time. "
        f"Darker bars hold more images.{calibration}",
        bins=[ReliabilityBin(*values) for values in known if len(values) == len(keys)],
    )


def error_spotting(record: Record) -> Bars:
    auroc = section(record.evaluation, "auroc")
    known = {name: value for name in MEASURES if (value := number(auroc.get(name))) is not None}
    names = sorted(known, key=lambda name: -known[name])
    return Bars(
        id="auroc",
        title="Which measure finds the errors",
        caption="How often a right prediction is rated more certain than a wrong one (AUROC). "
        "0.5 is guessing.",
        labels=[measure_title(name) for name in names],
        label_head="measure",
        series=[Series("AUROC", "target", [known[name] for name in names])],
        x=Axis("AUROC", low=0.0, high=1.0, decimals=3),
    )


def correlations(record: Record) -> Bars:
    """Draw figure 3c of the paper."""
    found = section(record.evaluation, "correlations")
    kinds = {kind: values for kind in ("pearson", "spearman") if (values := section(found, kind))}
    names = list(dict.fromkeys(name for values in kinds.values() for name in values))
    series = [
        Series(kind.capitalize(), str(i), [number(values.get(name)) for name in names])
        for i, (kind, values) in enumerate(kinds.items())
    ]
    negative = any(value is not None and value < 0 for each in series for value in each.values)
    return Bars(
        id="correlations",
        title="Correlation with sigma",
        caption="How far other measures agree with sigma over the target images (figure 3c of the "
        "paper). Signs are set so that more means more certain.",
        labels=[measure_title(name) for name in names],
        label_head="measure",
        series=series,
        x=Axis("correlation", low=-1.0 if negative else 0.0, high=1.0, decimals=2),
    )


# --- classes ---

Accuracies = Mapping[str, Any]


def class_chart(
    accuracies: Mapping[tuple[str, str], Accuracies], ranking: Sequence[Accuracies], caption: str
) -> Bars:
    """Draw accuracies per class, by (name, role); the hardest first, by the mean of `ranking`."""

    def mean(label: str) -> float:
        known = [share for each in ranking if (share := number(each.get(label))) is not None]
        return sum(known) / len(known) if known else float("inf")

    labels = {label for values in accuracies.values() for label in values}
    ranked = sorted(labels, key=lambda label: (mean(label), label))
    return Bars(
        id="per-class",
        title="Accuracy per class",
        caption=caption,
        labels=ranked,
        label_head="class",
        series=[
            Series(name, role, [number(values.get(label)) for label in ranked])
            for (name, role), values in accuracies.items()
        ],
        x=Axis("accuracy", percent=True, low=0.0, high=1.0),
        dots=True,
    )


def per_class(record: Record) -> Bars:
    before, after = (section(record.metrics, k, "per_class") for k in ("source_only", "adapted"))
    after = {name: share for name, share in after.items() if number(share) is not None}
    accuracies = {("before adaptation", "source"): {name: before.get(name) for name in after}}
    if section(record.metrics, "delivered").get("model") != "pretrained":
        accuracies["after adaptation", "target"] = after
    caption = "The classes that are hardest for the delivered model come first."
    return class_chart(accuracies, [after], caption)


def confusion(record: Record) -> Matrix:
    found = section(record.evaluation, "confusion")
    labels, counts = found.get("classes"), found.get("counts")
    rows = (
        [[int(n or 0) for n in numbers(row)] for row in counts] if isinstance(counts, list) else []
    )
    if not isinstance(labels, list) or {len(labels)} != {len(rows), *map(len, rows)}:
        labels, rows = [], []
    return Matrix(
        id="confusion",
        title="Confusion matrix",
        caption="A row per true class, a column per predicted class. Right predictions are on the "
        "diagonal.",
        labels=[str(label) for label in labels],
        cells=[(i, j, n) for i, row in enumerate(rows) for j, n in enumerate(row) if n > 0],
        totals=[sum(row) for row in rows],
    )


# --- training ---


def _steps(record: Record) -> tuple[list[float], float]:
    """Put the steps of both phases on one axis; also return the last step of pretraining, or 0."""
    steps = [(entry.get("phase"), number(entry.get("step")) or 0.0) for entry in record.history]
    pretrained = max((step for phase, step in steps if phase == "pretrain"), default=0.0)
    return [step + (pretrained if phase == "adapt" else 0.0) for phase, step in steps], pretrained


def history_line(record: Record, key: str, name: str, role: str) -> Line:
    values = [number(entry.get(key)) for entry in record.history]
    return line(name, role, zip(_steps(record)[0], values, strict=True))


def adaptation_mark(record: Record) -> list[Mark]:
    """Mark the end of pretraining; empty if the run has only one phase."""
    _, pretrained = _steps(record)
    adapts = any(entry.get("phase") == "adapt" for entry in record.history)
    return [Mark(pretrained, "adaptation begins")] if pretrained and adapts else []


def sigma_chart(lines: list[Line], marks: list[Mark], caption: str) -> Lines:
    return Lines(
        id="sigma",
        title="Sigma over time",
        caption=caption,
        x=Axis("training step"),
        y=Axis("median sigma", low=0.0),
        lines=lines,
        marks=marks,
    )


def sigma_over_time(record: Record) -> Lines:
    """Draw figures 3a and 3b of the paper."""
    return sigma_chart(
        [history_line(record, f"sigma_{side}", side, side) for side in ("source", "target")],
        adaptation_mark(record),
        "Median sigma of the images in a batch, by domain. A wide sigma means a sure prediction, "
        "so sigma grows while the model learns.",
    )


def losses(record: Record) -> Lines:
    keys = dict.fromkeys(key for entry in record.history for key in entry)
    names = [key for key in keys if key not in _NOT_LOSSES]
    if "loss" in names and len(names) == 2:
        names.remove("loss")  # the same as the only term
    roles = {name: "plain" if name == "loss" else str(i) for i, name in enumerate(names)}
    lines = [history_line(record, k, _LOSSES.get(k, k), role) for k, role in roles.items()]
    negative = any(y < 0 for each in lines for y in each.ys)
    return Lines(
        id="losses",
        title="Losses",
        caption="Each term of the loss and, if there are several, their weighted sum.",
        x=Axis("training step"),
        y=Axis("loss", low=None if negative else 0.0),
        lines=lines,
        marks=adaptation_mark(record),
    )


def learning_rate(record: Record) -> Lines:
    return Lines(
        id="learning-rate",
        title="Learning rate",
        caption="The learning rate of each step.",
        x=Axis("training step"),
        y=Axis("learning rate", low=0.0),
        lines=[history_line(record, "lr", "learning rate", "plain")],
        marks=adaptation_mark(record),
    )


def health(record: Record) -> Lines:
    """Draw the label-free scores per cycle."""

    def share(key: str, name: str, role: str, whole: int = 1) -> Line:
        known = [(number(entry.get("cycle")), number(entry.get(key))) for entry in record.scores]
        return line(name, role, [(x, None if y is None else y / whole) for x, y in known])

    return Lines(
        id="health",
        title="Health per cycle",
        caption="Scores that need no target labels. The collapse guard watches them.",
        x=Axis("cycle"),
        y=Axis("share", percent=True, low=0.0, high=1.0),
        lines=[
            share("source_accuracy", "accuracy on held-out source images", "source"),
            share("agreement_with_pretrained", "agreement with the pretrained model", "target"),
            share("classes_in_use", "share of classes in use", "plain", len(record.classes) or 1),
        ],
    )


SECTIONS: dict[str, tuple[Callable[[Record], Chart], ...]] = {
    "certainty": (risk_coverage, reliability, error_spotting),
    "classes": (per_class, confusion),
    "training": (sigma_over_time, losses, learning_rate, health),
    "paper": (correlations,),
}


def run_figures(record: Record) -> dict[str, list[Chart]]:
    """Return the charts of each section of a run's page."""
    return {
        name: [chart for draw in draws if not (chart := draw(record)).empty]
        for name, draws in SECTIONS.items()
    }
