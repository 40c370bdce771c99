"""Before a benchmark starts, catch errors that would fail every run, and earlier runs whose
settings differ.
"""

import json
from pathlib import Path

from certvol.benchmark.plan import BenchmarkOptions, checked
from certvol.data.folders import printable
from certvol.device import pick_device
from certvol.errors import UserError
from certvol.nn.backbones import describe
from certvol.runs.folder import RunFolder
from certvol.scores.validators import VALIDATORS
from certvol.settings import WITHOUT_EFFECT, Config, flatten, read_settings_file

MAY_DIFFER = WITHOUT_EFFECT | {"training.seed"}  # between the runs that a mean is taken over

# What a benchmark writes into its folder after `benchmark.json`.
WRITTEN = "results.csv table.md table.tex table.csv attempts.jsonl settings figures".split()


def check_options(options: BenchmarkOptions) -> None:
    if not options.seeds or min(options.seeds) < 0:
        raise UserError("--seeds needs whole numbers from 0, such as 0,1,2")
    if options.workers < 1:
        raise UserError(f"--workers should be 1 or more, found {options.workers}")
    if not 0 < options.gpu_share <= 1:
        raise UserError(f"--gpu-share should be above 0 and at most 1, found {options.gpu_share}")
    if options.validator not in VALIDATORS:
        known = ", ".join(VALIDATORS)
        raise UserError(f"unknown validator `{options.validator}` (validators: {known})")


def check_folder(out: Path, suite: str, root: Path | None) -> None:
    """Refuse a folder of a run, of another suite, or with runs on data from another root.

    If the earlier root no longer exists, it was moved.
    """
    if RunFolder(out).holds_a_run:
        raise UserError(f"{out} is a run; give another folder as --out")
    try:
        before = json.loads((out / "benchmark.json").read_text(encoding="utf-8"))
        earlier_suite, earlier_root = before["suite"], before.get("data")
    except FileNotFoundError:
        foreign = next((name for name in WRITTEN if (out / name).exists()), None)
        if foreign is not None:
            raise UserError(
                f"{out} holds {foreign}, which no benchmark wrote; give another folder as --out"
            ) from None
        return
    except OSError as error:
        raise UserError(f"cannot use {out} for the benchmark: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out / 'benchmark.json'} is damaged; give another --out") from None
    if earlier_suite != suite:
        raise UserError(
            f"{out} holds the benchmark {earlier_suite}, not {suite}; give another --out"
        )
    if root is None or earlier_root is None or not Path(earlier_root).exists():
        return
    if not Path(earlier_root).samefile(root):
        raise UserError(
            f"the runs in {out} were made from {printable(earlier_root)}, not from "
            f"{printable(root)}; give the same --data, or another --out"
        )


def earlier_images(out: Path) -> dict[str, str]:
    """Return the fingerprints of the domains that earlier calls with this folder used."""
    try:
        found = json.loads((out / "benchmark.json").read_text(encoding="utf-8")).get("images")
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def check_network(config: Config, device_here: bool) -> None:
    """Raise UserError if the device, backbone or weights file of some runs does not exist.

    `device_here`: the runs use this machine's device.
    """
    if device_here:
        pick_device(config.training.device)
    describe(config.model.backbone, config.data.image_size)
    weights = config.model.weights
    if weights not in (None, "none") and not Path(weights).is_file():
        found = "is not a file" if Path(weights).exists() else "not found"
        raise UserError(
            f"weights file {printable(weights)} {found}; check the path, or use --weights none to "
            "train from scratch"
        )


def check_same_settings(folder: Path, planned: Config) -> None:
    """Refuse a run with other settings than its method has now: a mean would mix both."""
    try:
        given = read_settings_file(folder / "config.yaml")
    except UserError:
        return  # missing, or damaged: the run's status says so
    again = "give another --out, or the settings it was made with"
    try:
        before = flatten(checked(given).as_dict(), str(folder))
    except UserError as error:
        raise UserError(f"{folder} was made with invalid settings ({error}); {again}") from None
    now = flatten(planned.as_dict(), "settings")
    if now["model.feature_dims"] is None:  # each run chooses, by its number of images
        now["model.feature_dims"] = before["model.feature_dims"]
    for name in sorted({*before, *now} - MAY_DIFFER):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{folder} was made with `{name}` {before.get(name)}, now it is {now.get(name)}; "
                f"{again}"
            )
