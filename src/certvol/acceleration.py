"""What makes a model fast on its device, in one place: layout, precision, compilation."""

import torch

from certvol.config import TrainingConfig
from certvol.methods.protocol import AdaptationMethod

WORTH_COMPILING = 5_000  # steps: below, compiling takes longer than it saves
CPU_EVALUATION_BATCH, GPU_EVALUATION_BATCH = 256, 512


def evaluation_batch(device: torch.device) -> int:
    return GPU_EVALUATION_BATCH if device.type == "cuda" else CPU_EVALUATION_BATCH


def uses_bf16(settings: TrainingConfig, device: torch.device) -> bool:
    if settings.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return settings.precision == "bf16"


def compiles(settings: TrainingConfig, device: torch.device, steps: int) -> bool:
    if settings.compile == "auto":
        return device.type == "cuda" and steps >= WORTH_COMPILING
    return settings.compile == "always"


def prepare(method: AdaptationMethod, settings: TrainingConfig, device: torch.device, steps: int) -> AdaptationMethod:
    """Moves the method to the device, laid out and compiled for training of so many steps. Sets torch's own switches too."""
    method.to(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiles(settings, device, steps):
        method.network.compile_backbone(evaluation_batch(device))
    return method
