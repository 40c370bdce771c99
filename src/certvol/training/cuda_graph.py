"""Record a training step as a CUDA graph and replay it, so that the GPU never waits for Python."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from certvol.methods._base import Batch, ReviewedRows

Terms = dict[str, Tensor]
TrainOn = Callable[[Batch], Terms]

WARM_UP = 3  # steps before a recording: they create momentum and choose the fastest convolutions
MOST_RECORDINGS = 4  # further kinds of batch, made by source images that stand in, are rare


class Recording:
    """A recorded step for one kind of batch; the next replay overwrites its inputs and results."""

    def __init__(self, train_on: TrainOn, batch: Batch, pool: Any, stream: Any) -> None:
        other, reviewed = batch.other_inputs, batch.reviewed
        self.batch = replace(
            batch,
            inputs=batch.inputs.clone(),
            labels_N=batch.labels_N.clone(),
            progress=batch.progress.clone(),
            other_inputs=None if other is None else other.clone(),
            tables={name: rows.clone() for name, rows in batch.tables.items()},
            logged={},
            reviewed=None if reviewed is None else _cloned(reviewed),
        )
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(batch.generator)
        # Another thread may be writing weights to a file, which must not disturb the recording.
        mode = "thread_local"
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode=mode):
            self.terms = train_on(self.batch)

    def replay(self, batch: Batch) -> tuple[Terms, Batch]:
        for own, given in zip(_changing(self.batch), _changing(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.terms, replace(self.batch, num_source=batch.num_source)


def _changing(batch: Batch) -> list[Tensor]:
    """Return the tensors that differ from step to step."""
    found = [batch.inputs, batch.labels_N, batch.progress, *batch.tables.values()]
    if batch.other_inputs is not None:
        found.append(batch.other_inputs)
    if batch.reviewed is not None:
        found += [batch.reviewed.inputs, batch.reviewed.labels_R]
    return found


def _cloned(rows: ReviewedRows) -> ReviewedRows:
    return replace(rows, inputs=rows.inputs.clone(), labels_R=rows.labels_R.clone())


@cache
def _side_stream(device: int) -> Any:
    """Return one stream for all runs of a process, because streams do not share their memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Recorder:
    """Takes the first steps of a kind directly and replays later ones, with the same results."""

    def __init__(self, train_on: TrainOn, enabled: bool) -> None:
        self.train_on, self.enabled = train_on, enabled
        self.stream: Any = _side_stream(torch.cuda.current_device()) if enabled else None
        self.forget()

    def forget(self) -> None:
        """Drop recordings, because tensors they work on are replaced (by a new optimiser, say)."""
        self.seen: dict[tuple[object, ...], int] = {}
        self.recordings: dict[tuple[object, ...], Recording] = {}

    def run(self, batch: Batch, mode: str, split_matters: bool) -> tuple[Terms, Batch]:
        """Take a step in a norm mode.

        `split_matters`: steps with different numbers of source rows are different kinds.
        """
        if not self.enabled:
            return self.train_on(batch), batch
        split = batch.num_source if split_matters else None
        kind = (batch.adapting, mode, split, *batch.inputs.shape)
        if self.recordings and next(iter(self.recordings))[:2] != kind[:2]:
            self.forget()  # the previous phase does not come back
        if kind in self.recordings:
            return self.recordings[kind].replay(batch)
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if self.seen[kind] <= WARM_UP or len(self.recordings) >= MOST_RECORDINGS:
            return self._run_unrecorded(batch), batch
        pool = next(iter(self.recordings.values())).graph.pool() if self.recordings else None
        self.recordings[kind] = Recording(self.train_on, batch, pool, self.stream)
        return self.recordings[kind].replay(batch)

    def _run_unrecorded(self, batch: Batch) -> Terms:
        """Use the stream of recordings: autograd ties gradients to the stream that made them."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            terms = self.train_on(batch)
        here.wait_stream(self.stream)
        return terms
