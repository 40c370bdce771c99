"""All randomness is a function of (seed, name of the stream, place in it).

Nothing carries a generator's state from step to step, so a run that resumes at step n draws what it would have drawn.
"""

import zlib

import numpy as np
import torch


def _entropy(seed: int, stream: str, *place: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(stream.encode()), *place])


def numpy_generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_entropy(seed, stream, *place)))


def torch_seed(seed: int, stream: str, *place: int) -> int:
    return int(_entropy(seed, stream, *place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(device: torch.device | str, seed: int, stream: str, *place: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(torch_seed(seed, stream, *place))
