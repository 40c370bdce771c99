"""What makes a model fast on its device, in one place: precision, compilation. (The layout is the backbone's own.)"""

import torch

from certvol.config import TrainingConfig
from certvol.environment import cpu_has_bf16
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.network import Network

WORTH_COMPILING = 5_000  # steps: below, compiling takes longer than it saves
WORTH_BF16 = 64  # pixels, on a CPU: below, a step takes milliseconds and may as well be exact
CPU_EVALUATION_BATCH, GPU_EVALUATION_BATCH = 256, 512


def evaluation_batch(device: torch.device) -> int:
    return GPU_EVALUATION_BATCH if device.type == "cuda" else CPU_EVALUATION_BATCH


def uses_bf16(settings: TrainingConfig, network: Network, device: torch.device) -> bool:
    if settings.precision != "auto":
        return settings.precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return network.trained_part != "head" and network.info.image_size >= WORTH_BF16 and cpu_has_bf16()


def compiles(settings: TrainingConfig, device: torch.device, steps: int) -> bool:
    if settings.compile == "auto":
        return device.type == "cuda" and steps >= WORTH_COMPILING
    return settings.compile == "always"


def prepare(method: AdaptationMethod, settings: TrainingConfig, device: torch.device, steps: int) -> AdaptationMethod:
    """Moves the method to the device, compiled for training of so many steps. Sets torch's own switches too."""
    method.to(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    # A frozen backbone sees each image once, before training.
    if method.network.trained_part != "head" and compiles(settings, device, steps):
        method.network.compile_backbone(evaluation_batch(device))
    return method
