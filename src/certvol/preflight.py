"""By what every run with some settings would fail: told before the first of many."""

from pathlib import Path

from certvol.config import Config
from certvol.data.folders import printable
from certvol.environment import pick_device
from certvol.errors import UserError
from certvol.nn.backbones import describe


def check_network(config: Config, device_here: bool) -> None:
    """UserError where a device, a backbone or a weights file is not there. `device_here`: runs are on this machine."""
    if device_here:
        pick_device(config.training.device)
    describe(config.model.backbone, config.data.image_size)
    weights = config.model.weights
    if weights not in (None, "none") and not Path(str(weights)).is_file():
        found = "is no file" if Path(str(weights)).exists() else "is not there"
        raise UserError(
            f"the weights file {printable(str(weights))} {found}; give a .safetensors or .pth file, or none to train from scratch"
        )
