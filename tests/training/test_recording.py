"""Recording needs a GPU; without one, steps run as they are."""

from dataclasses import replace

import pytest
import torch

from certvol.config import TrainingConfig
from certvol.methods.protocol import Batch
from certvol.training.distributed import Team
from certvol.training.recording import WARM_UP, Recorder
from certvol.training.stepper import Stepper
from methods.test_contract import METHODS, fitted, make_batch, make_method

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_without_recording_every_step_runs_as_it_is() -> None:
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
def test_a_replay_is_the_step_it_was_recorded_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            other = batch.other_images_NCHW
            on_gpu = replace(
                batch,
                images_NCHW=batch.images_NCHW.cuda(),
                labels_N=batch.labels_N.cuda(),
                progress=batch.progress.cuda(),
                generator=stepper.noise,
                other_images_NCHW=None if other is None else other.cuda(),
                tables={key: rows.cuda() for key, rows in batch.tables.items()},
            )
            stepper.recorder.run(on_gpu, "mixed", True)
        assert len(stepper.recorder.recordings) == record
        weights.append({key: value.clone() for key, value in method.state_dict().items()})
    off = {key: float((value.float() - weights[1][key].float()).abs().max()) for key, value in weights[0].items()}
    assert max(off.values()) < 1e-5, sorted(off.items(), key=lambda entry: -entry[1])[:3]
