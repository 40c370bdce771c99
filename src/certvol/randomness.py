"""Draw all randomness from (seed, name of the stream, place in it).

No generator carries its state from step to step, so a run that resumes at step n draws what it
would have drawn without the stop.
"""

import zlib

import numpy as np
import torch


def _seed_sequence(seed: int, stream: str, *place: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(stream.encode()), *place])


def numpy_generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_seed_sequence(seed, stream, *place)))


def torch_seed(seed: int, stream: str, *place: int) -> int:
    return int(_seed_sequence(seed, stream, *place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_torch(device: torch.device, seed: int) -> None:
    """Seed torch's own generators of the CPU and of the device.

    `torch.manual_seed` also keeps a stack trace for a GPU that is not in use, at every call.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def torch_generator(
    device: torch.device | str, seed: int, stream: str, *place: int
) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(torch_seed(seed, stream, *place))
