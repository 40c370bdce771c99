"""The device a run computes on."""

import torch

from certvol.errors import UserError

CPU_EVALUATION_BATCH, GPU_EVALUATION_BATCH = 256, 512


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device `{name}`; expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device `{name}` is not supported; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"device `{name}` is not available: this machine has no usable CUDA device; "
                "leave out --device, or give cpu"
            )
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise UserError(
                f"device `{name}` does not exist: there are {count} CUDA devices, from cuda:0"
            )
    return device


def evaluation_batch(device: torch.device) -> int:
    """Return how many images are predicted at a time."""
    return GPU_EVALUATION_BATCH if device.type == "cuda" else CPU_EVALUATION_BATCH


def cpu_has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 in hardware; emulation is slower than fp32."""
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in instructions)
