"""Processor time of a step of adaptation by every method that trains, over that of `basic`: small_cnn, 60 random images of 16 px.

    OMP_NUM_THREADS=1 python benchmarks/method_steps.py

All methods in turn in one process, so that whatever else the machine does meets all alike; drawing batches, labelling and the
looks between cycles are not counted."""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from certvol.methods import discover
from certvol.methods.protocol import AdaptationMethod, Batch
from methods import test_contract as made  # a method and a batch that fits it

IMAGES, ROUNDS = 60, 25
SETTINGS = {"cvp": {"num_samples": 16}}  # as in recipes/digits.yaml


def one_step(method: AdaptationMethod, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    began = time.process_time()
    with method.network.rows_of(num_source=batch.num_source):
        terms = method.loss_terms(batch)
    optimizer.zero_grad(set_to_none=True)
    method.loss(terms).backward()
    optimizer.step()
    method.after_step()
    if method.teacher is not None:
        method.teacher.follow()
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    made.CLASSES = 10
    players = {}
    for name, kind in discover().items():
        if kind.closed_form or not kind.adapts:
            continue
        method = made.make_method(name, **SETTINGS.get(name, {})).train()
        if method.teacher is not None:
            method.teacher.start()
        batch = made.fitted(method, made.make_batch(n=IMAGES))
        method.train()
        weights = [weight for weight in method.parameters() if weight.requires_grad]
        players[name] = (method, batch, torch.optim.SGD(weights, lr=1e-4, momentum=0.9, nesterov=True))
    for player in players.values():  # to warm up
        one_step(*player)
    times: dict[str, list[float]] = {name: [] for name in players}
    for _ in range(ROUNDS):
        for name, player in players.items():
            times[name].append(one_step(*player))
    base = statistics.median(times["basic"])
    print(f"basic: {1000 * base:.1f} ms")
    for name, found in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        print(f"{name:16} {statistics.median(found) / base:.2f}")


if __name__ == "__main__":
    main()
