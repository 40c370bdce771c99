"""How many images a training step can hold in the GPU's memory, measured when a step did not fit."""

import gc

import torch

from certvol.inference import mixed_precision
from certvol.methods.protocol import AdaptationMethod, Batch

FEW, MORE = 8, 16  # rows of the two trials: what they differ by is what an image takes
SAFE = 0.9  # of the memory; the rest is for pieces that cannot be joined
MULTIPLE = 8


def largest_batch(method: AdaptationMethod, bf16: bool, device: torch.device) -> int | None:
    """An estimate, by two small steps in what is left of the memory. None where even they do not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        few, more = (_peak(method, rows, bf16, device) for rows in (FEW, MORE))
    except torch.OutOfMemoryError:
        return None
    finally:
        method.zero_grad(set_to_none=True)
    number = torch.cuda.current_device() if device.index is None else device.index
    share = torch.cuda.get_per_process_memory_fraction(number)
    return rows_that_fit(few, more, torch.cuda.get_device_properties(number).total_memory * share)


def rows_that_fit(few: float, more: float, total: float) -> int | None:
    """From the memory that a step of FEW and one of MORE rows took, and all there is."""
    per_row = max((more - few) / (MORE - FEW), 1.0)
    rows = FEW + int((SAFE * total - few) / per_row)
    return rows // MULTIPLE * MULTIPLE if rows >= MULTIPLE else None


def _peak(method: AdaptationMethod, rows: int, bf16: bool, device: torch.device) -> int:
    size = method.network.info.image_size
    images = torch.zeros(rows, 3, size, size, device=device)
    batch = Batch(
        images_NCHW=images,
        labels_N=torch.arange(rows, device=device) % method.network.num_classes,
        num_source=rows,
        rows=torch.arange(rows),
        total=rows,
        generator=torch.Generator(device),
        progress=torch.zeros((), device=device),
        adapting=False,
    )
    torch.cuda.reset_peak_memory_stats(device)
    with method.network.rows_of(num_source=rows), mixed_precision(device, bf16):
        loss = method.loss(method.train().loss_terms(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated(device)
