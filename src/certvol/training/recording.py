"""A training step recorded once as a CUDA graph, and replayed: the GPU then never waits for Python to launch its kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from certvol.methods.protocol import Batch

Terms = dict[str, Tensor]
TrainOn = Callable[[Batch], Terms]

WARM_UP = 3  # steps before a recording: they create momentum and choose the fastest convolutions
MOST_RECORDINGS = (
    4  # kinds of batch beyond these, which source images that stand in make, are rare: they run unrecorded
)


class Recording:
    """One kind of batch. Its inputs and results lie in fixed places, which the next replay overwrites."""

    def __init__(self, train_on: TrainOn, batch: Batch, pool: Any, stream: Any) -> None:
        other = batch.other_images_NCHW
        self.batch = replace(
            batch,
            images_NCHW=batch.images_NCHW.clone(),
            labels_N=batch.labels_N.clone(),
            progress=batch.progress.clone(),
            other_images_NCHW=None if other is None else other.clone(),
            tables={name: rows.clone() for name, rows in batch.tables.items()},
            watched={},
        )
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(batch.generator)
        # Weights may be on their way to a file in another thread, which must not disturb the recording.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.terms = train_on(self.batch)

    def replay(self, batch: Batch) -> tuple[Terms, Batch]:
        for mine, given in zip(_inputs(self.batch), _inputs(batch), strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.terms, replace(self.batch, num_source=batch.num_source)


def _inputs(batch: Batch) -> list[Tensor]:
    """What differs from step to step."""
    other = [] if batch.other_images_NCHW is None else [batch.other_images_NCHW]
    return [batch.images_NCHW, batch.labels_N, batch.progress, *other, *batch.tables.values()]


@cache
def _stream_aside(device: int) -> Any:
    """One for all steps of all runs of a process: the memory of a stream, cuBLAS's workspace too, is not given to another."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Recorder:
    """Runs steps: the first of a kind as they are, later ones as a replay. Either way it is the same step."""

    def __init__(self, train_on: TrainOn, enabled: bool) -> None:
        self.train_on, self.enabled = train_on, enabled
        self.aside: Any = _stream_aside(torch.cuda.current_device()) if enabled else None
        self.forget()

    def forget(self) -> None:
        """Where tensors that a recording works on are replaced: a new optimiser, another mode of normalisation."""
        self.seen: dict[tuple[object, ...], int] = {}
        self.recordings: dict[tuple[object, ...], Recording] = {}

    def run(self, batch: Batch, mode: str, split_matters: bool) -> tuple[Terms, Batch]:
        """`mode` of normalisation. `split_matters`: another number of source rows makes another step."""
        if not self.enabled:
            return self.train_on(batch), batch
        kind = (batch.adapting, mode, batch.num_source if split_matters else None, *batch.images_NCHW.shape)
        if self.recordings and next(iter(self.recordings))[:2] != kind[:2]:
            self.forget()  # the phase before does not come back
        if kind in self.recordings:
            return self.recordings[kind].replay(batch)
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if self.seen[kind] <= WARM_UP or len(self.recordings) >= MOST_RECORDINGS:
            return self._unrecorded(batch), batch
        pool = next(iter(self.recordings.values())).graph.pool() if self.recordings else None
        self.recordings[kind] = Recording(self.train_on, batch, pool, self.aside)
        return self.recordings[kind].replay(batch)

    def _unrecorded(self, batch: Batch) -> Terms:
        """On a stream aside, as a recording is made: autograd ties gradients to the stream they were first made on."""
        here = torch.cuda.current_stream()
        self.aside.wait_stream(here)
        with torch.cuda.stream(self.aside):
            terms = self.train_on(batch)
        here.wait_stream(self.aside)
        return terms
