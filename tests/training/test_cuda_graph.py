"""Recording needs a GPU; without one, steps run directly."""

from dataclasses import replace

import pytest
import torch

from certvol.distributed import Team
from certvol.methods._base import Batch
from certvol.settings import TrainingConfig
from certvol.training.cuda_graph import WARM_UP, Recorder
from certvol.training.step import Stepper
from support.methods import METHODS, fitted, make_batch, make_method

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_without_recording_every_step_runs_directly() -> None:
    seen: list[Batch] = []

    def train_on(batch: Batch) -> dict[str, torch.Tensor]:
        seen.append(batch)
        return {"ce": torch.zeros(())}

    recorder, batch = Recorder(train_on, enabled=False), make_batch()
    for _ in range(WARM_UP + 3):
        terms, returned = recorder.run(batch, "mixed", True)
        assert returned is batch
        assert set(terms) == {"ce"}
    assert len(seen) == WARM_UP + 3
    assert not recorder.recordings


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_replay_computes_the_recorded_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Views:
        device = torch.device("cuda")

    weights = []
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for record in (False, True):
        method = make_method(name).cuda().train()
        settings = TrainingConfig(record=record, precision="fp32")
        stepper = Stepper(method, Views(), settings, Team(), bf16=False)  # type: ignore[arg-type]
        for place in range(WARM_UP + 4):
            torch.manual_seed(place)
            stepper.noise.manual_seed(place)
            batch = fitted(make_method(name), make_batch(seed=place), place)
            other = batch.other_inputs
            on_gpu = replace(
                batch,
                inputs=batch.inputs.cuda(),
                labels_N=batch.labels_N.cuda(),
                progress=batch.progress.cuda(),
                generator=stepper.noise,
                other_inputs=None if other is None else other.cuda(),
                tables={key: rows.cuda() for key, rows in batch.tables.items()},
            )
            stepper.recorder.run(on_gpu, "mixed", True)
        assert len(stepper.recorder.recordings) == record
        weights.append({key: value.clone() for key, value in method.state_dict().items()})
    off = {
        key: float((value.float() - weights[1][key].float()).abs().max())
        for key, value in weights[0].items()
    }
    assert max(off.values()) < 1e-5, sorted(off.items(), key=lambda entry: -entry[1])[:3]
