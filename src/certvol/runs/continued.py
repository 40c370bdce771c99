"""Continue from a finished run: take over its settings, and find the weights to start from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.progress import Reporter
from certvol.runs.checkpoint import damage_explained, read_about
from certvol.runs.folder import RunFolder
from certvol.settings import ModelConfig, absolute_path, read_settings_file

# Another seed or share would hold out images that have trained the model.
KEPT = ("method.name", "model.norm", "training.pretrain_steps", "training.seed", "data.holdout")


def settings_from(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a new run continues from the one at `path`.

    `given` overrides them, except for those on which the weights or the held-out images depend.
    """
    run = RunFolder(path)
    shown = printable(run.path)
    run.check_run()
    run.check_complete()
    settings = read_settings_file(run.config)
    settings |= {
        "model.start": absolute_path(str(path)),
        "model.norm": _about(run.model)["norm"],
        "training.pretrain_steps": 0,
        "data.target_labels": None,
        "data.label_kinds": "chosen",
    }
    for name in KEPT:
        if name in given and str(given[name]) != str(settings.get(name)):
            raise UserError(
                f"a run that continues from {shown} keeps `{name}` {settings.get(name)}; leave "
                f"`{name}` out, or start a new run without --from"
            )
    return settings


def start_weights(run: RunFolder, model: ModelConfig, header: Mapping[str, Any]) -> Path | None:
    """Return the weights that a run starts from; None if it pretrains.

    A run keeps them once it has begun, so it does not need the other run to resume. `header` is
    that of the run's own weights: classes and features must be those of the start.
    """
    if model.start is None:
        return None
    place = run.pretrained if run.pretrained.exists() else RunFolder(model.start).model
    if not place.exists():
        raise UserError(
            f"{printable(place)} is missing, which `model.start` continues from; give the "
            "folder of a complete run"
        )
    about = _about(place)
    if about["classes"] != header["classes"]:
        raise UserError(
            f"the run {printable(model.start)} has other classes than the source; continue with "
            "the source that it was trained on"
        )
    _check_features(about["features"], header.get("features"))
    return place


def _check_features(before: str | None, now: str | None) -> None:
    """Refuse features of another backbone; None if it is not known what made them."""
    if before and now and before != now:
        raise UserError(
            f"the features were made by {printable(now)}, those of the run to continue from by "
            f"{printable(before)}; extract them with the same backbone, weights and image size"
        )


def check_source(start: str, fingerprint: str, reporter: Reporter) -> None:
    """Warn if the source is not the one that trained the run that another starts from."""
    known = RunFolder(start).checkpoints.newest_facts().get("fingerprints")
    before = known.get("source") if isinstance(known, dict) else None
    if before not in (None, fingerprint):
        reporter.warn(
            f"the source is not the one that trained {printable(start)}: images that are held out "
            "now may have trained its model, so what is measured on them may look too good"
        )


def _about(weights: Path) -> dict[str, Any]:
    with damage_explained(weights):
        found = read_about(weights)
        features = found.get("features")
        return {
            "classes": found["classes"],
            "norm": found["norm"],
            "features": features if isinstance(features, str) else None,
        }
