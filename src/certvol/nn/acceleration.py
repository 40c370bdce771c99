"""Choose the precision of a network on its device, and compile it if that pays off."""

import torch
from torch import nn

from certvol import device as devices
from certvol.nn.network import Network
from certvol.settings import TrainingConfig

MIN_STEPS_TO_COMPILE = 5_000  # for fewer steps, compiling takes longer than it saves
MIN_PIXELS_FOR_BF16 = 64  # on a CPU; with smaller images a step takes only milliseconds


def uses_bf16(settings: TrainingConfig, network: Network, device: torch.device) -> bool:
    """Return whether training runs in bf16; predictions never do."""
    if settings.precision != "auto":
        return settings.precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    large = network.info.image_size >= MIN_PIXELS_FOR_BF16
    return network.trained_part != "head" and large and devices.cpu_has_bf16()


def prepare(
    method: nn.Module, network: Network, settings: TrainingConfig, device: torch.device, steps: int
) -> None:
    """Move a method and its network to the device; compile the backbone if `steps` make it pay.

    On a GPU this also sets torch's global switches for TF32 and cuDNN.
    """
    method.to(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    repaid = device.type == "cuda" and steps >= MIN_STEPS_TO_COMPILE
    compiles = settings.compile == "always" or (settings.compile == "auto" and repaid)
    # The features of a frozen backbone are extracted once, before training.
    if network.trained_part != "head" and compiles:
        network.compile_backbone(devices.evaluation_batch(device))
