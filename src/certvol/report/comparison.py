"""Compare several runs: the figures, and the page that holds them."""

import dataclasses
from collections.abc import Sequence

from certvol.data.folders import printable
from certvol.report.charts import Axis, Bars, Chart, Lines, Series
from certvol.report.figures import (
    adaptation_mark,
    class_chart,
    history_line,
    risk_chart,
    risk_line,
    sigma_chart,
)
from certvol.report.records import Record, number, section
from certvol.report.render import render
from certvol.report.summary import setting_text, summary, verdict

Runs = dict[str, Record]


def comparison_figures(runs: Runs) -> list[Chart]:
    """Return the charts of runs, which are named as `name_runs` does."""
    charts = (_risk_coverage(runs), _sigma(runs), _per_class(runs), _oscillation(runs))
    return [chart for chart in charts if not chart.empty]


def _risk_coverage(runs: Runs) -> Lines:
    return risk_chart(
        [
            risk_line(record, record.certainty, f"{name} ({record.certainty})", str(i))
            for i, (name, record) in enumerate(runs.items())
        ],
        "If you accept only the most certain images, this share of them is wrong. The "
        "measure in brackets ranks the images: sigma behind a frozen backbone, else the largest "
        "probability.",
    )


def _sigma(runs: Runs) -> Lines:
    lines = []
    for i, (name, record) in enumerate(runs.items()):
        source = history_line(record, "sigma_source", f"{name}, source", str(i))
        target = history_line(record, "sigma_target", f"{name}, target", str(i))
        lines += [target, dataclasses.replace(source, dashed=True)]
    marks = {mark for record in runs.values() for mark in adaptation_mark(record)}
    caption = "Median sigma of the images in a batch, for the runs whose method has a sigma."
    return sigma_chart(lines, list(marks) if len(marks) == 1 else [], caption)


def _per_class(runs: Runs) -> Bars:
    accuracies = {
        (name, str(i)): found
        for i, (name, record) in enumerate(runs.items())
        if (found := section(record.metrics, "adapted", "per_class"))
    }
    caption = (
        "Accuracies of the delivered models. The classes that are hardest on average come first."
    )
    return class_chart(accuracies, list(accuracies.values()), caption)


def _oscillation(runs: Runs) -> Bars:
    found = {name: section(record.evaluation, "oscillation") for name, record in runs.items()}
    totals = {name: number(each.get("total")) for name, each in found.items()}
    known = {name: total for name, total in totals.items() if total is not None}
    floors = [number(found[name].get("floor")) for name in known]
    return Bars(
        id="oscillation",
        title="Oscillation of the decision boundary",
        caption="How often the predicted class changes on the way between two target images. The "
        "floor is the least possible.",
        labels=list(known),
        label_head="run",
        series=[
            Series("oscillation", "target", list(known.values())),
            Series("floor", "plain", floors),
        ],
        x=Axis("oscillation", low=0.0, high=1.05 * max(1e-9, *known.values(), 0.0)),
    )


def name_runs(records: Sequence[Record]) -> Runs:
    """Name runs by their folders, with as many parent folders as make the names unique."""
    for depth in range(1, 12):
        names = [printable("/".join(record.path.parts[-depth:])) for record in records]
        if len(set(names)) == len(names):
            return dict(zip(names, records, strict=True))
    return {f"{i}: {record.name}": record for i, record in enumerate(records, 1)}


def comparison_page(records: Sequence[Record]) -> str:
    runs = name_runs(records)
    charts = comparison_figures(runs)
    context = {
        "title": "Runs compared",
        "names": list(runs),
        "rows": [_row(name, record) for name, record in runs.items()],
        "figures": charts,
        "settings": _differing_settings(records),
        "labelled": any(record.metrics is not None for record in records),
        "notes": _notes(runs),
    }
    return render("comparison.html", context, {"figures": [chart.data() for chart in charts]})


def _row(name: str, record: Record) -> list[str]:
    found = summary(record)
    found["verdict"] = (verdict(record) or {}).get("word", "")
    keys = ("source_only", "adapted", "verdict", "at_90", "mean_class", "aurc", "ece", "duration")
    seed = str(record.settings.get("training.seed", "–"))
    return [name, *(found[key] or "–" for key in keys), record.method, found["backbone"], seed]


def _differing_settings(records: Sequence[Record]) -> list[list[str]]:
    keys = dict.fromkeys(key for record in records for key in record.settings)
    rows = []
    for key in keys:
        if len({repr(record.settings.get(key, "absent")) for record in records}) > 1:
            values = [setting_text(r.settings[key]) if key in r.settings else "" for r in records]
            rows.append([key, *values])
    return rows


def _notes(runs: Runs) -> list[str]:
    """Say what keeps these runs from being compared, and what is wrong with each."""
    notes = []
    if len({str(record.target) for record in runs.values()}) > 1:
        notes.append(
            "These runs have different targets, so their numbers come from different images and do "
            "not compare the methods."
        )
    without = [name for name, record in runs.items() if record.metrics is None]
    if 0 < len(without) < len(runs):
        notes.append(f"No target labels, and so no accuracies: {', '.join(without)}.")
    return notes + [f"{name}: {note}" for name, record in runs.items() for note in record.notes]
