"""Build the page of one run: its numbers, its figures, and a gallery of all target images."""

from pathlib import Path
from typing import Any

import numpy as np

from certvol.data import Indices
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.progress import Reporter
from certvol.report import summary
from certvol.report.embedding import Embedding, embed
from certvol.report.figures import measure_title, run_figures
from certvol.report.records import MEASURES, Images, Record, number
from certvol.report.render import json_block, render
from certvol.report.thumbnails import Thumbnails, make_thumbnails
from certvol.runs.environment import made_here
from certvol.settings import DataConfig

PAGE_BYTES = 38_000_000
_TEXT_BYTES = 300_000  # template, scripts and style
_LEAST_FOR_THUMBNAILS = 4_000_000


def run_page(record: Record, reporter: Reporter, target: Path | None = None) -> str:
    """Return the page as HTML. `target` is where the target folder is, if it was moved."""
    notes = list(record.notes)
    sections = run_figures(record)
    charts = [chart.data() for charts in sections.values() for chart in charts]
    data: dict[str, Any] = {"figures": charts}
    embedding, sheets = None, []
    if record.images is not None:
        # Rows of predictions.csv, the most certain image first.
        order_N = np.argsort(-record.images.measures[record.certainty], kind="stable")
        data["gallery"] = _gallery(record, record.images, order_N)
        embedding = _embedding(record, notes, reporter)
        if embedding is not None:
            data["embedding"] = _points(embedding, order_N)
        paths = [record.images.paths[i] for i in order_N]
        left = PAGE_BYTES - len(json_block(data)) - _TEXT_BYTES
        budget = max(left, _LEAST_FOR_THUMBNAILS)
        root = target or _image_folder(record, notes, reporter)
        if root is not None:
            most = number(record.settings.get("data.max_megapixels")) or DataConfig().max_megapixels
            pictures = make_thumbnails(root, paths, most, budget, reporter)
            if target is not None and pictures.missing == len(pictures.shapes):
                raise UserError(
                    f"--target {printable(str(target))} has none of the run's images, such as "
                    f"{printable(paths[0])}; give the folder that `certvol adapt` was given"
                )
            notes += _picture_notes(pictures)
            data["gallery"]["pictures"] = pictures.data()
            sheets = pictures.encoded()
    context = {
        "title": record.name,
        "record": record,
        "figures": sections,
        "summary": summary.summary(record),
        "verdict": summary.verdict(record),
        "class_counts": summary.class_counts(record),
        "settings": summary.settings_by_section(record),
        "labelled": record.images is not None and record.images.true_N is not None,
        "certainty": measure_title(record.certainty),
        "embedding": embedding,
        "rejection": summary.rejection_table(record),
        "oscillation": summary.oscillation(record),
        "warnings": summary.warnings(record),
        "notes": notes,
    }
    return render("run.html", context, data, sheets)


def _gallery(record: Record, images: Images, order_N: Indices) -> dict[str, Any]:
    return {
        "run": printable(str(record.path)),
        "classes": record.classes,
        "paths": [images.paths[i] for i in order_N],
        "predicted": images.predicted_N[order_N].tolist(),
        "truth": None if images.true_N is None else images.true_N[order_N].tolist(),
        "certainty": record.certainty,
        "measures": [
            {
                "name": name,
                "title": MEASURES[name].title,
                "sign": 1 if MEASURES[name].more_is_certain else -1,
                "values": [float(f"{value:.9g}") for value in values_N[order_N]],
            }
            for name, values_N in images.measures.items()
        ],
        "pictures": None,
    }


def _embedding(record: Record, notes: list[str], reporter: Reporter) -> Embedding | None:
    if record.features is None:
        return None
    count = len(record.features.rows_n)
    reporter.say(f"laying out the features of {count} images by t-SNE ...")
    try:
        return embed(record.features)
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
        notes.append(f"t-SNE failed on the features: {printable(str(error))[:200]}")
        return None


def _points(embedding: Embedding, order_N: Indices) -> dict[str, Any]:
    place_N = np.argsort(order_N)  # the place in the gallery of each row of predictions.csv
    adapted_n2 = embedding.adapted_n2
    return {
        "images": place_N[embedding.rows_n].tolist(),
        "pretrained": embedding.pretrained_n2.round(4).tolist(),
        "adapted": None if adapted_n2 is None else adapted_n2.round(4).tolist(),
    }


def _image_folder(record: Record, notes: list[str], reporter: Reporter) -> Path | None:
    """Return the run's target folder; None, and a note, if it has no images to show."""
    root = record.target
    place = "unknown" if root is None else printable(str(root))
    if root is not None and root.is_dir():
        if made_here(root, record.environment.get("origin")):
            return root
        note = (
            "You did not make this run on this machine, so images of the folder that it names "
            f"({place}) are not put into the page. If they are yours to show, run "
            "`certvol report RUN --target FOLDER`."
        )
        reporter.warn(note)
    elif root is not None and root.suffix.lower() == ".npz":
        note = (
            "This run was given features, not images, so there are no thumbnails. If the rows are "
            "named by image paths, add them with `certvol report RUN --target FOLDER`."
        )
    else:
        note = (
            f"The folder of the target images was not found ({place}), so there are no thumbnails. "
            "If it was moved, run `certvol report RUN --target FOLDER`."
        )
        reporter.warn(note)
    notes.append(note)
    return None


def _picture_notes(pictures: Thumbnails) -> list[str]:
    notes = []
    shown = len(pictures.shapes)
    if pictures.skipped:
        notes.append(
            f"Only the {shown // 2:,} most and the {shown // 2:,} least certain of "
            f"{shown + pictures.skipped:,} images have thumbnails. Figures and filters cover all."
        )
    if pictures.missing:
        notes.append(
            f"{pictures.missing:,} of {shown:,} images could not be read and have no thumbnail."
        )
    return notes
