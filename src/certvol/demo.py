"""Adapt synthetic digits to real ones, exactly as a user's own folders are adapted."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from certvol import api
from certvol.benchmark.preflight import check_same_settings
from certvol.data.digits import write_digits
from certvol.errors import Interrupted, UserError
from certvol.progress import Reporter, StopSignal
from certvol.runs.folder import RunFolder
from certvol.runs.tables import write_text
from certvol.settings import read_settings_file
from certvol.training.setup import with_trained_part

PRESET = "quick"
SETTINGS = {
    "augment.flip": False,  # a mirrored digit is another digit, or none
    "data.image_size": 16,  # the images have 8 x 8 pixels
}


def run(
    out: Path,
    seed: int,
    methods: Sequence[str],
    reporter: Reporter,
    stop_signal: StopSignal,
    given: Mapping[str, Any],
) -> dict[str, float]:
    """Return the target accuracy of every method; resume runs that were stopped.

    `given` settings replace the demo's own.
    """
    if RunFolder(out).holds_a_run:
        raise UserError(f"{out} is a run; give another folder for the demo's runs as --out")
    settings_of = {
        method: {**SETTINGS, **given, "method.name": method, "training.seed": seed}
        for method in methods
    }
    begun = {method: _begun(out / method, settings) for method, settings in settings_of.items()}
    own = (out / "data").exists() or any(begun.values())
    if (out / "summary.json").exists() and not own:
        raise UserError(f"{out} holds a summary.json that no demo wrote; give another --out")
    source, target = write_digits(out / "data", seed=0)
    adapt = partial(api.adapt, reporter=reporter, stop_signal=stop_signal)
    accuracies = {}
    for method, settings in settings_of.items():
        reporter.say(f"--- {method}")
        try:
            if begun[method]:
                finished = adapt(resume=out / method)
            else:
                finished = adapt(source, target, out / method, preset=PRESET, **settings)
        except Interrupted as stopped:
            message = "stopped; repeat the same command to continue"
            raise Interrupted(message, stopped.exit_code) from None
        assert finished.metrics is not None, "the demo's target has labels"
        accuracies[method] = float(finished.metrics["adapted"]["accuracy"])
    write_text(out / "summary.json", json.dumps(accuracies, indent=2) + "\n")
    return accuracies


def _begun(run: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the run exists; UserError for wrong settings, or others than it has."""
    resolved = api.resolve_settings(PRESET, settings=settings)
    planned = with_trained_part(api.with_absolute_paths(resolved))
    folder, seed = RunFolder(run), planned.training.seed
    if not folder.holds_a_run:
        return False
    before = read_settings_file(folder.config).get("training.seed")
    if before != seed:
        raise UserError(f"{run} holds a run of seed {before}, not {seed}; give another --out")
    check_same_settings(run, planned)
    return True
