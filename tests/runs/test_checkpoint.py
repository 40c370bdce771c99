import os
from pathlib import Path

import pytest
import torch

from certvol.runs.checkpoint import (
    Checkpoints,
    State,
    load_tensors,
    optimizer_tensors,
    read_about,
    restore_optimizer,
    write_tensors,
)


def _state(value: float) -> State:
    return State({"x": torch.full((3,), value)}, {"value": value})


def _value(checkpoints: Checkpoints) -> tuple[float | None, int]:
    state, warnings = checkpoints.load()
    return (None if state is None else state.tensors["x"][0].item()), len(warnings)


def test_the_newest_state_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    assert _value(checkpoints) == (None, 0)
    for value in (1.0, 2.0, 3.0):
        checkpoints.save(_state(value))
        assert _value(checkpoints) == (value, 0)
    state, _ = checkpoints.load()
    assert state is not None
    assert state.facts == {"value": 3.0}


def test_only_two_states_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for value in range(5):
        checkpoints.save(_state(value))
    assert len(list(tmp_path.glob("state-*"))) == 2


def test_states_and_weights_load_from_a_folder_with_a_name_that_is_not_unicode(
    tmp_path: Path,
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    checkpoints = Checkpoints(folder)
    checkpoints.save(_state(1))
    assert _value(checkpoints) == (1, 0)
    write_tensors(folder / "weights.safetensors", {"x": torch.arange(3)}, {"norm": "mixed"})
    assert load_tensors(folder / "weights.safetensors")["x"].tolist() == [0, 1, 2]
    assert read_about(folder / "weights.safetensors") == {"norm": "mixed"}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"1",
        b'"a"',
        b'{"__metadata__": 1}',
        b'{"__metadata__": {"certvol": 1}}',
        b'{"__metadata__": {"certvol": "[]"}}',
    ],
)
def test_the_header_of_another_file_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "weights.safetensors"
    for length in (len(header), 1 << 62):
        file.write_bytes(length.to_bytes(8, "little") + header)
        with pytest.raises((KeyError, TypeError, ValueError)):
            read_about(file)


def test_the_header_of_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    write_tensors(file, {"x": torch.arange(3)}, {"norm": "mixed"})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="incomplete"):
        read_about(file)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_the_state_before_a_damaged_one_is_loaded(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(_state(1))
    checkpoints.save(_state(2))
    newest = max(tmp_path.glob("state-*"))
    raw = newest.read_bytes()
    if damage == "truncate":
        newest.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        newest.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    else:
        newest.unlink()
    assert _value(checkpoints) == (1, 1)


def test_an_interrupted_write_leaves_the_last_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(_state(1))
    (tmp_path / "state-000002.safetensors").write_bytes(b"half a fi")
    (tmp_path / "latest.json.part").write_text("[{")
    assert _value(checkpoints) == (1, 0)
    checkpoints.save(_state(2))
    assert _value(checkpoints) == (2, 0)


def test_a_pointer_never_leads_outside_its_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(_state(1))
    outside = tmp_path / "outside.safetensors"
    write_tensors(outside, {"x": torch.zeros(3)})
    pointer = tmp_path / "checkpoint" / "latest.json"
    pointer.write_text(
        pointer.read_text().replace("state-000001.safetensors", "../outside.safetensors")
    )
    assert _value(checkpoints) == (None, 1)


def test_the_optimizer_state_is_restored_exactly() -> None:
    def steps(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            torch.autograd.backward((weight**2).sum())
            optimizer.step()

    def fresh(values: torch.Tensor) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        weight = torch.nn.Parameter(values.clone())
        return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True)

    weight, optimizer = fresh(torch.tensor([1.0, 2.0]))
    steps(optimizer, weight, 3)
    twin, other = fresh(weight.detach())
    restore_optimizer(other, optimizer_tensors(optimizer))
    steps(optimizer, weight, 3)
    steps(other, twin, 3)
    assert torch.equal(weight, twin)


def test_a_state_with_altered_facts_is_not_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(_state(1))
    checkpoints.save(_state(2))
    pointer = tmp_path / "latest.json"
    pointer.write_text(pointer.read_text().replace('"value": 2', '"value": 7'))
    assert _value(checkpoints) == (1.0, 1)


def test_optimizer_state_takes_the_memory_layout_of_its_parameter() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    restore_optimizer(optimizer, {"optimizer.0.momentum_buffer": torch.randn(4, 3, 2, 2)})
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()


def test_the_previous_checkpoint_is_kept_only_if_asked_for(tmp_path: Path) -> None:
    for keeps, files in ((True, 2), (False, 1)):
        checkpoints = Checkpoints(tmp_path / str(keeps))
        checkpoints.keeps_previous = keeps
        for number in range(3):
            checkpoints.save(State({"x": torch.full((2,), float(number))}, {"number": number}))
        assert len(list(checkpoints.folder.glob("state-*.safetensors"))) == files
        state, warnings = Checkpoints(checkpoints.folder).load()
        assert state is not None
        assert state.facts == {"number": 2}
        assert not warnings
