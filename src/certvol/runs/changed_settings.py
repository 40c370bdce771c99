"""Notice that RUN/config.yaml was edited after the run's model was trained."""

from collections.abc import Mapping
from typing import Any

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.runs.folder import RunFolder
from certvol.settings import WITHOUT_EFFECT, shown

# What a model's predictions depend on, beside its weights.
USED = (
    *("method.", "model.", "training.mc_"),
    *("data.image_size", "data.view_set", "data.max_megapixels"),
)
NOT_USED = WITHOUT_EFFECT | {"model.weights", "model.start"}  # places of files, which may move


def check_unchanged(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a run with which its model would not predict as it was trained to.

    The newest checkpoint holds the settings of training. A run without checkpoints is not checked.
    """
    before = run.checkpoints.newest_facts().get("settings")
    if not isinstance(before, dict):
        return
    for name, value in settings.items():
        is_used = name.startswith(USED) and name not in NOT_USED
        if is_used and name in before and before[name] != value:
            raise UserError(
                f"{printable(str(run.config))} was edited after training (`{name}` "
                f"{shown(before[name])} -> {shown(value)}), so it does not fit the model; undo "
                "that, and give other settings to a new run"
            )
