"""The embedded default: synthetic digits to real ones, by the same way as any user's folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from certvol import api
from certvol.config import read_settings_file
from certvol.data.digits import write_digits
from certvol.errors import Interrupted, UserError
from certvol.reporting import Reporter
from certvol.stopping import StopSignal
from certvol.tables import write_text
from certvol.training.run_folder import RunFolder

METHODS = ("source_only", "basic", "cvp")
SETTINGS = {
    "augment.flip": False,  # a mirrored digit is another digit, or none
    "data.image_size": 16,  # the images have 8 x 8 pixels
}


def run(out: Path, seed: int, methods: Sequence[str], reporter: Reporter, stop_signal: StopSignal) -> dict[str, float]:
    """Target accuracy by method. Runs that are there already are gone on with, or only read."""
    for method in methods:
        api.resolve_settings(settings={"method.name": method})  # tells a mistaken name before anything is run
    if RunFolder(out).holds_a_run:
        raise UserError(f"{out} is a run itself; give a folder for the demo's runs as --out")
    source, target = write_digits(out / "data", seed=0)
    try:
        accuracies = {method: _accuracy(method, source, target, out, seed, reporter, stop_signal) for method in methods}
    except Interrupted as stopped:
        raise Interrupted("stopped; the same command goes on from here", stopped.exit_code) from None
    write_text(out / "summary.json", json.dumps(accuracies, indent=2) + "\n")
    return accuracies


def _accuracy(
    method: str, source: Path, target: Path, out: Path, seed: int, reporter: Reporter, stop_signal: StopSignal
) -> float:
    reporter.say(f"--- {method}")
    folder = RunFolder(out / method)
    if folder.holds_a_run:
        _same_seed(folder, seed)
        finished = api.adapt(resume=folder.path, reporter=reporter, stop_signal=stop_signal)
    else:
        settings: dict[str, Any] = {"method.name": method, "training.seed": seed, **SETTINGS}
        finished = api.adapt(
            source, target, folder.path, preset="quick", reporter=reporter, stop_signal=stop_signal, **settings
        )
    if finished.metrics is None:
        raise AssertionError("the demo's target folder tells its labels")
    return float(finished.metrics["adapted"]["accuracy"])


def _same_seed(folder: RunFolder, seed: int) -> None:
    before = read_settings_file(folder.config).get("training.seed")
    if before != seed:
        raise UserError(f"{folder.path} holds a run of seed {before}, not {seed}; give another --out")
