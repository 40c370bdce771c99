"""Write the numbers of a run as text: the overview, tables and notes of its page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from certvol.data.sources import split_places
from certvol.predict.verdict import WORDS
from certvol.progress import duration, percent
from certvol.report.charts import Table
from certvol.report.figures import measure_title
from certvol.report.records import MEASURES, Record, number, section
from certvol.scores.validators import is_spreading_warning


def summary(record: Record) -> dict[str, Any]:
    """Return the numbers of the overview; those that the run lacks are empty."""
    metrics, settings, scores = record.metrics, record.settings, section(record.evaluation)
    delivered = {**record.about, **section(metrics, "delivered")}
    model = str(delivered.get("model") or delivered.get("delivered") or "")
    before, after = (
        number(section(metrics, key).get("accuracy")) for key in ("source_only", "adapted")
    )
    gain = "" if before is None or after is None else f"{100 * (after - before):+.1f}"
    at_coverage = section(scores, "accuracy_at_coverage", record.certainty)
    return {
        "source_only": percent(before),
        "before_name": "Before adaptation"
        if settings.get("model.start") is None
        else "Starting model",
        "adapted": "" if model == "pretrained" else percent(after),
        "gain": gain,
        "mean_class": _percent(section(metrics, "adapted").get("mean_class_accuracy")),
        "at_90": _percent(at_coverage.get("0.9")),
        "aurc": _score(section(scores, "aurc").get(record.certainty)),
        "ece": _score(scores.get("ece")),
        "delivered": model_in_words(model),
        "why": delivered.get("why", ""),
        "norm": delivered.get("norm", ""),
        "images": len(record.images.paths) if record.images is not None else 0,
        "backbone": _backbone(str(settings.get("model.backbone", "unknown"))),
        "device": _device(section(record.environment, "device")),
        "duration": "" if record.seconds is None else duration(record.seconds),
        "source": _source_names(settings),
        "target": _folder_name(settings.get("data.target")),
    }


def model_in_words(delivered: str) -> str:
    """Say which model a run delivered: `last`, `pretrained`, `cycle 3`, or empty for none yet."""
    known = {"last": "after adaptation", "pretrained": "before adaptation", "": "none yet"}
    return known.get(delivered, f"of {delivered}")


def verdict(record: Record) -> dict[str, Any] | None:
    """Return the run's verdict about itself, for the page; None if it has no verdict."""
    found = section(record.verdict)
    word, reasons = found.get("verdict"), found.get("reasons")
    if word not in WORDS or not isinstance(reasons, list):
        return None
    accuracy, changed, source = (section(found, key) for key in ("accuracy", "changed", "source"))
    images = number(found.get("images")) or 0
    return {
        "word": word,
        "mark": ("good", "look", "bad")[WORDS.index(word)],
        "reasons": [str(reason) for reason in reasons],
        "estimate": _percent(accuracy.get("estimate"), 0),
        "labels": number(accuracy.get("labels")) or 0,
        "usual_error": _percent(accuracy.get("usual_error"), 0),
        "changed": _percent(changed.get("share"), 0),
        "source_before": _percent(source.get("before")),
        "source_after": _percent(source.get("after")),
        "held_out": number(source.get("images")) or 0,
        "images": images,
        "sampled": (number(found.get("target_images")) or 0) > images,
    }


def class_counts(record: Record) -> Table | None:
    """Tabulate predicted images per class before and after adaptation, most changed first."""
    rows = []
    for name, counts in section(record.verdict, "classes").items():
        before, after = (number(section(counts).get(key)) for key in ("before", "after"))
        if before is not None and after is not None:
            rows.append((name, before, after))
    if not rows:
        return None
    rows.sort(key=lambda row: (-abs(row[2] - row[1]), row[0]))
    cells = [[name, f"{b:.0f}", f"{a:.0f}", f"{a - b:+.0f}"] for name, b, a in rows]
    return ["class", "before", "after", "change"], cells


def warnings(record: Record) -> list[tuple[str, str]]:
    """Return each warning, and what the labels say about it: training warns without seeing them."""
    found = summary(record)
    remark = ""
    if found["gain"] and found["adapted"]:
        gain = float(found["gain"])
        effect = "no change" if gain == 0 else "a gain" if gain > 0 else "a loss"
        remark = (
            f"The target's labels, which training did not see, show {effect}: "
            f"{found['source_only']} % right before adaptation, {found['adapted']} % after."
        )
    return [(text, remark if is_spreading_warning(text) else "") for text in record.warnings]


def settings_by_section(record: Record) -> dict[str, dict[str, str]]:
    """Group settings as `training` -> `cycles` -> `40`; software versions come last."""
    grouped: dict[str, dict[str, str]] = {}
    for name, value in record.settings.items():
        group, _, key = name.partition(".")
        grouped.setdefault(group, {})[key] = setting_text(value)
    versions = {k: str(version) for k, version in section(record.environment, "versions").items()}
    if versions and (commit := record.environment.get("commit")):
        versions["commit"] = str(commit)
    return {**grouped, **({"versions": versions} if versions else {})}


def setting_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rejection_table(record: Record) -> Table | None:
    """Tabulate the accuracy of the most certain images, by the measure that ranks them."""
    found = section(record.evaluation, "accuracy_at_coverage")
    areas = section(record.evaluation, "aurc")
    rows = [
        [
            measure_title(name),
            *(_percent(shares.get(share)) or "–" for share in ("0.8", "0.9", "0.95")),
            _score(areas.get(name)) or "–",
        ]
        for name in MEASURES
        if (shares := section(found, name))
    ]
    return (["measure", "80 %", "90 %", "95 %", "AURC"], rows) if rows else None


def oscillation(record: Record) -> Mapping[str, str] | None:
    found = section(record.evaluation, "oscillation")
    total, floor = number(found.get("total")), number(found.get("floor"))
    if total is None:
        return None
    return {
        "total": f"{total:,.2f}",
        "floor": "–" if floor is None else f"{floor:,.2f}",
        "ratio": f"{total / floor:.2f}" if floor else "",
        "images": f"{number(found.get('images')) or 0:,.0f}",
    }


def _percent(value: Any, decimals: int = 1) -> str:
    return percent(number(value), decimals)


def _source_names(settings: Mapping[str, Any]) -> str:
    """Return the names of all source folders."""
    more = settings.get("data.more_sources")
    others = split_places(more) if isinstance(more, str) else []
    return " + ".join(_folder_name(place) for place in [settings.get("data.source"), *others])


def _score(value: Any) -> str:
    known = number(value)
    return "" if known is None else f"{known:.3f}"


def _backbone(name: str) -> str:
    dim = name.removeprefix("features-")
    return f"features of {dim} dimensions" if dim != name else name


def _device(found: Mapping[str, Any]) -> str:
    name = str(found.get("name") or "unknown device")
    return f"CPU ({name})" if found.get("type") == "cpu" else name


def _folder_name(place: Any) -> str:
    return Path(place).name or place if isinstance(place, str) else "unknown"
