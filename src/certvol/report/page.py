"""One self-contained page for a run, and one that compares runs: no network, nothing beside it.

Three lines of defence against a hostile name of a file or class: Jinja escapes what goes into the markup, `_json` what goes
into data blocks, and the policy in the page's head lets only our own script run and forbids every request.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from jinja2.loaders import FunctionLoader
from markupsafe import Markup

from certvol.config import DataConfig
from certvol.data.folders import printable
from certvol.errors import CertvolError, Interrupted, UserError
from certvol.outputs import check_output
from certvol.report import figures, thumbnails
from certvol.report.embedding import Embedding, embed
from certvol.report.records import MEASURES, Images, Record, number, read_record, section
from certvol.report.thumbnails import Thumbnails, make_thumbnails
from certvol.reporting import Reporter
from certvol.selection import tells_of_spreading
from certvol.tables import write_text

PAGE_BYTES = 38_000_000  # with all thumbnails; what else a page holds comes first
_LEAST_FOR_THUMBNAILS = 4_000_000
_SCRIPTS = ("start.js", "charts.js", "pictures.js", "gallery.js", "embedding.js")


def write_report(
    run: str | Path | Record, reporter: Reporter, target: str | Path | None = None, out: str | Path | None = None
) -> Path:
    """RUN/report.html, or `out`. `target`: where the target images are now, if no longer where they were."""
    if target is not None and not Path(target).is_dir():
        raise UserError(f"there is no folder {printable(str(target))} with target images")
    record = run if isinstance(run, Record) else read_record(run)
    page = run_page(record, reporter, None if target is None else Path(target))
    return _write(page, record.path / "report.html" if out is None else Path(out))


def write_comparison(runs: Sequence[str | Path | Record], out: str | Path) -> Path:
    records = [run if isinstance(run, Record) else read_record(run) for run in runs]
    return _write(comparison_page(records), Path(out))


def _write(page: str, place: Path) -> Path:
    check_output(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, page)
    except OSError as error:
        raise UserError(f"cannot write {printable(str(place))}: {error.strerror}") from None
    return place


def report_on_finished(run: Path, reporter: Reporter) -> Path | None:
    """At the end of a run, which is complete whatever happens here. A report that is newer than the model is kept."""
    place, model = run / "report.html", run / "model.safetensors"
    again = f"make it with `certvol report {printable(str(run))}`"
    try:
        if not place.exists() or place.stat().st_mtime_ns < model.stat().st_mtime_ns:
            write_report(run, reporter)
        return place
    except Interrupted as stopped:
        raise Interrupted(f"the run is complete, only its report was stopped; {again}", stopped.exit_code) from None
    except Exception as error:  # a page must never cost a run
        reason = str(error) if isinstance(error, CertvolError | OSError) else f"{type(error).__name__}: {error}"
        reporter.warn(f"the run is complete, but its report could not be made ({printable(reason)}); {again}")
        return None


# --- a run ---------------------------------------------------------------------------------------------------------------


def run_page(record: Record, reporter: Reporter, target: Path | None = None) -> str:
    notes = list(record.notes)
    drawn = figures.run_figures(record)
    embedding = _embedding(record, notes, reporter)
    order_N = _order(record.images) if record.images is not None else np.empty(0, np.int64)
    data: dict[str, Any] = {"figures": [_figure_data(figure) for figure in drawn.values()]}
    if record.images is not None:
        data["gallery"] = _gallery_data(record, record.images, order_N)
        if embedding is not None:
            data["embedding"] = _embedding_data(embedding, order_N)
    context = {
        "title": record.name,
        "record": record,
        "figures": drawn,
        "summary": _summary(record),
        "settings": _by_section(record.settings),
        "labelled": record.images is not None and record.images.true_N is not None,
        "certainty": None if record.images is None else MEASURES[record.images.certainty].title,
        "has_sigma": record.images is not None and "sigma" in record.images.measures,
        "embedding": embedding,
        "rejection": _rejection_table(record),
        "oscillation": _oscillation(record),
        "open_set": _open_set(record),
        "warnings": _warnings(record),
        "notes": notes,
    }
    budget = max(PAGE_BYTES - len(_json(data)) - 300_000, _LEAST_FOR_THUMBNAILS)
    sheets: list[str] = []
    if record.images is not None:
        pictures = _pictures(record, record.images, order_N, target, budget, notes, reporter)
        data["gallery"]["pictures"] = _picture_data(pictures, len(order_N))
        sheets = pictures.encoded() if pictures is not None else []
    return _render("run.html", context, data, sheets)


def _order(images: Images) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of predictions.csv, the most certain first; of equals, the first."""
    return np.argsort(-images.measures[images.certainty], kind="stable").astype(np.int64)


def _gallery_data(record: Record, images: Images, order_N: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    return {
        "run": printable(str(record.path)),
        "classes": record.classes,
        "paths": [images.paths[i] for i in order_N],
        "predicted": images.predicted_N[order_N].tolist(),
        "truth": None if images.true_N is None else images.true_N[order_N].tolist(),
        "certainty": images.certainty,
        "measures": [
            {
                "name": name,
                "title": MEASURES[name].title,
                "sign": 1 if MEASURES[name].more_is_certain else -1,
                "values": [float(f"{value:.9g}") for value in images.measures[name][order_N]],
            }
            for name in MEASURES
            if name in images.measures
        ],
    }


def _embedding(record: Record, notes: list[str], reporter: Reporter) -> Embedding | None:
    if record.features is None or record.images is None:
        return None
    try:
        reporter.say(f"laying out the features of {len(record.features.rows_n)} images by t-SNE ...")
        return embed(record.features)
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
        notes.append(f"The features could not be laid out by t-SNE: {printable(str(error))[:200]}")
        return None


def _embedding_data(embedding: Embedding, order_N: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    place_N = np.empty(len(order_N), np.int64)
    place_N[order_N] = np.arange(len(order_N))

    def points(points_n2: Any) -> list[list[float]]:
        return [[round(float(x), 4), round(float(y), 4)] for x, y in points_n2]

    return {
        "images": place_N[embedding.rows_n].tolist(),
        "pretrained": points(embedding.pretrained_n2),
        "adapted": None if embedding.adapted_n2 is None else points(embedding.adapted_n2),
    }


def _pictures(
    record: Record,
    images: Images,
    order_N: np.ndarray[Any, np.dtype[np.int64]],
    target: Path | None,
    budget: int,
    notes: list[str],
    reporter: Reporter,
) -> Thumbnails | None:
    root = target or record.target
    if target is None and root is not None and root.suffix.lower() == ".npz" and not root.is_dir():
        notes.append(
            "This run was given features instead of images, so there are no thumbnails. If the rows are named by the paths of "
            "images, `certvol report RUN --target FOLDER` says which folder they lie in."
        )
        return None
    if root is None or not root.is_dir():
        place = printable(str(root)) if root is not None else "unknown"
        notes.append(
            f"The target images are not where they were ({place}), so there are no thumbnails. "
            "`certvol report RUN --target FOLDER` says where they are now."
        )
        reporter.warn(notes[-1])
        return None
    pictured = _pictured(len(order_N))
    if len(pictured) < len(order_N):
        notes.append(
            f"Of {len(order_N):,} images the {len(pictured) // 2:,} most and the {len(pictured) // 2:,} least certain have "
            "thumbnails; figures and filters are about all of them."
        )
    most = number(record.settings.get("data.max_megapixels")) or DataConfig().max_megapixels
    made = make_thumbnails(root, [images.paths[order_N[i]] for i in pictured], most, budget, reporter)
    if target is not None and made.missing == len(pictured):
        raise UserError(
            f"none of the run's images, such as {printable(images.paths[0])}, lies in {printable(str(target))}; --target should "
            "be the folder that was given to `certvol adapt`"
        )
    if made.missing:
        notes.append(f"{made.missing:,} of {len(pictured):,} images could not be read and show a placeholder.")
    return made


def _pictured(count: int) -> list[int]:
    """Which of the images, by rank, have a thumbnail."""
    most = thumbnails.MOST_THUMBNAILS
    return list(range(count)) if count <= most else [*range(most // 2), *range(count - most // 2, count)]


def _picture_data(pictures: Thumbnails | None, count: int) -> dict[str, Any] | None:
    if pictures is None:
        return None
    return {
        "cell": pictures.cell,
        "columns": thumbnails.COLUMNS,
        "perSheet": thumbnails.PER_SHEET,
        "shapes": pictures.shapes,
        "skipFrom": min(count, thumbnails.MOST_THUMBNAILS // 2),
        "skipped": max(0, count - thumbnails.MOST_THUMBNAILS),
    }


# --- what the summary says ------------------------------------------------------------------------------------------------


def _percent(value: Any) -> str | None:
    share = number(value)
    return None if share is None else f"{100 * share:.1f}"


def _summary(record: Record) -> dict[str, Any]:
    metrics, about = record.metrics, record.about
    delivered = {**about, **section(metrics, "delivered")}
    before, after = (number(section(metrics, key).get("accuracy")) for key in ("source_only", "adapted"))
    found: dict[str, Any] = {
        "source_only": _percent(before),
        "adapted": _percent(after) if delivered.get("model", delivered.get("delivered")) != "pretrained" else None,
        "gain": None if before is None or after is None else f"{100 * (after - before):+.1f}",
        "mean_class": _percent(section(metrics, "adapted").get("mean_class_accuracy")),
        "delivered": printable(str(delivered.get("model") or delivered.get("delivered") or "")),
        "why": printable(str(delivered.get("why", ""))),
        "norm": printable(str(delivered.get("norm", ""))),
        "images": None if record.images is None else len(record.images.paths),
        "classes": len(record.classes),
        "backbone": printable(str(record.settings.get("model.backbone", "unknown"))),
        "device": printable(str(section(record.environment, "device").get("name", "unknown device"))),
        "seconds": None if record.seconds is None else _duration(record.seconds),
        "source": _folder_name(record.settings.get("data.source")),
        "target": _folder_name(record.settings.get("data.target")),
        "commit": printable(str(record.environment.get("commit") or "")),
        "versions": {printable(str(k)): printable(str(v)) for k, v in section(record.environment, "versions").items()},
    }
    measure = record.images.certainty if record.images is not None else "probability"
    found["at_90"] = _percent(section(record.evaluation, "accuracy_at_coverage", measure).get("0.9"))
    return found


def _warnings(record: Record) -> list[tuple[str, str | None]]:
    """Each with what the labels at hand say of it: training warns without them."""
    return [(warning, _by_labels(record) if tells_of_spreading(warning) else None) for warning in record.warnings]


def _by_labels(record: Record) -> str | None:
    told = _summary(record)
    before, after, gain = (told[key] for key in ("source_only", "adapted", "gain"))
    if before is None or after is None:
        return None
    found = "no change" if float(gain) == 0 else "a gain" if float(gain) > 0 else "a loss"
    return f"The target's labels, which training did not see, show {found}: {before} % right before adaptation, {after} % after."


def _folder_name(place: Any) -> str:
    return printable(Path(place).name or place) if isinstance(place, str) else "unknown"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _by_section(settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    grouped: dict[str, dict[str, str]] = {}
    for name, value in settings.items():
        group, _, key = name.partition(".")
        grouped.setdefault(printable(group), {})[printable(key)] = _setting(value)
    return grouped


def _setting(value: Any) -> str:
    words = {None: "–", True: "yes", False: "no"}
    if value is None or isinstance(value, bool):
        return words[value]
    return printable(f"{value:g}" if isinstance(value, float) else str(value))


def _rejection_table(record: Record) -> list[dict[str, str]]:
    """How accurate the most certain share is, by measure."""
    found = section(record.evaluation, "accuracy_at_coverage")
    areas = section(record.evaluation, "aurc")
    rows = []
    for name in MEASURES:
        shares = section(found, name)
        if shares:
            area = number(areas.get(name))
            cells = {share: _percent(shares.get(share)) or "–" for share in ("0.8", "0.9", "0.95")}
            rows.append({"title": MEASURES[name].title, **cells, "aurc": "–" if area is None else f"{100 * area:.2f}"})
    return rows


def _oscillation(record: Record) -> dict[str, Any] | None:
    found = section(record.evaluation, "oscillation")
    total, floor = number(found.get("total")), number(found.get("floor"))
    if total is None:
        return None
    return {
        "total": f"{total:,.4g}",
        "floor": "–" if floor is None else f"{floor:,.4g}",
        "ratio": f"{total / floor:.2f}" if floor else None,
        "images": number(found.get("images")),
    }


def _open_set(record: Record) -> dict[str, Any] | None:
    found = section(record.evaluation, "unknown")
    rows = [
        {
            "title": figures.measure_title(name),
            "auroc": _percent(value),
            "fpr": _percent(section(found, "fpr_at_95_tpr").get(name)),
        }
        for name, value in section(found, "auroc").items()
        if number(value) is not None
    ]
    return {"images": number(found.get("images")), "rows": rows} if rows else None


# --- several runs ---------------------------------------------------------------------------------------------------------


def comparison_page(records: Sequence[Record]) -> str:
    names = run_names(records)
    drawn = figures.comparison_figures(records, names)
    rows = []
    for record, name in zip(records, names, strict=True):
        measure = record.images.certainty if record.images is not None else "probability"
        area = number(section(record.evaluation, "aurc").get(measure))
        rows.append(
            {
                "name": name,
                "record": record,
                "summary": _summary(record),
                "aurc": None if area is None else f"{100 * area:.2f}",
                "ece": _percent(section(record.evaluation).get("ece")),
                "oscillation": _oscillation(record),
            }
        )
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    differing = {
        printable(key): [_setting(record.settings[key]) if key in record.settings else "" for record in records]
        for key in keys
        if len({repr(record.settings.get(key, "absent")) for record in records}) > 1
    }
    context = {
        "title": "Runs compared",
        "names": names,
        "rows": rows,
        "figures": drawn,
        "differing": differing,
        "labelled": any(record.metrics is not None for record in records),
        "notes": [
            *_unlike(records, names),
            *(f"{name}: {note}" for record, name in zip(records, names, strict=True) for note in record.notes),
        ],
    }
    return _render("comparison.html", context, {"figures": [_figure_data(figure) for figure in drawn.values()]}, [])


def _unlike(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """What keeps runs from being compared."""
    notes = []
    if len({str(record.target) for record in records}) > 1:
        notes.append(
            "These runs have different targets: their figures are of different images, and do not compare methods."
        )
    without = [name for record, name in zip(records, names, strict=True) if record.metrics is None]
    if without and len(without) < len(records):
        notes.append(f"Without labels of the target, and so without accuracies: {', '.join(without)}.")
    return notes


def run_names(records: Sequence[Record]) -> list[str]:
    """Of the runs' folders; with as many folders above as tell them apart."""
    for depth in range(1, 12):
        names = [printable("/".join(record.path.parts[-depth:])) for record in records]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {record.name}" for i, record in enumerate(records)]


# --- the file -------------------------------------------------------------------------------------------------------------


def _figure_data(figure: figures.Figure) -> dict[str, Any]:
    return {"kind": figure.kind, **dataclasses.asdict(figure)}


def _json(data: Any) -> str:
    """Fit for a script block: nothing in it can end the block or begin a comment. NaN, which is no JSON, becomes null."""
    text = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if np.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def _asset(name: str) -> str:
    return resources.files("certvol.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"


def _render(template: str, context: Mapping[str, Any], data: Any, sheets: list[str]) -> str:
    style = "\n" + _asset("page.css")
    script = "\n(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_asset), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = lambda text: printable(str(text))
    return environment.get_template(template).render(
        **context,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=Markup(_json(data)),
        sheets=sheets,
    )
