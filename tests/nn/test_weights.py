import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from certvol.errors import UserError
from certvol.nn.weights import read_weights


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "conv.weight": torch.arange(12.0).reshape(3, 4),
        "bn.num_batches_tracked": torch.tensor(7),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_safetensors_are_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "w.safetensors")
    assert same(read_weights(tmp_path / "w.safetensors"), tensors)


def test_a_file_name_need_not_be_unicode(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "w.safetensors")
    odd = (tmp_path / "w.safetensors").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    assert same(read_weights(odd), tensors)


@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_are_read_whatever_their_name(
    tmp_path: Path, tensors: dict[str, Tensor], suffix: str, zipped: bool
) -> None:
    torch.save(tensors, tmp_path / f"w.{suffix}", _use_new_zipfile_serialization=zipped)
    assert same(read_weights(str(tmp_path / f"w.{suffix}")), tensors)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
def test_wrapped_weights_are_unwrapped(
    tmp_path: Path, tensors: dict[str, Tensor], wrapper: str
) -> None:
    prefixed = {f"module.{name}": value for name, value in tensors.items()}
    torch.save({"epoch": 3, wrapper: prefixed, "optimizer": {"lr": 0.1}}, tmp_path / "w.pth")
    assert same(read_weights(tmp_path / "w.pth"), tensors)


def test_a_prefix_is_removed_only_if_all_names_have_it(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "w.pth")
    assert set(read_weights(tmp_path / "w.pth")) == {"module.a", "b"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_and_counts_stay_whole(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save_file(
        {"w": torch.tensor([0.5, 2.0], dtype=dtype), "count": torch.tensor(3)},
        tmp_path / "w.safetensors",
    )
    read = read_weights(tmp_path / "w.safetensors")
    assert read["w"].dtype == torch.float32
    assert read["w"].tolist() == [0.5, 2.0]
    assert read["count"].dtype == torch.int64


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_malicious_file_is_refused_and_its_payload_never_runs(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    mark, file = tmp_path / "executed", tmp_path / f"w.{suffix}"
    content = {"state_dict": {"w": torch.ones(2)}, "extra": Payload(mark)}
    if kind == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError, match=r"execute code|not a weights file"):
        read_weights(file)
    assert not mark.exists()


def test_whole_models_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(UserError, match="state_dict"):
        read_weights(tmp_path / "model.pth")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["safetensors", "pth", "legacy.pth"])
def test_truncated_files_are_refused(tmp_path: Path, share: float, kind: str) -> None:
    file = tmp_path / f"w.{kind}"
    content = {f"layer{k}.weight": torch.rand(64) for k in range(20)}
    if kind == "safetensors":
        save_file(content, file)
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "pth")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(UserError, match=r"w\."):
        read_weights(file)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, these are no weights", b"\x89PNG\r\n\x1a\n" + bytes(50), bytes(8) + b"{"],
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors", "jpg"])
def test_other_files_are_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"w.{suffix}").write_bytes(content)
    with pytest.raises(UserError):
        read_weights(tmp_path / f"w.{suffix}")


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, torch.ones(3), {"state_dict": {}}])
def test_files_without_named_tensors_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match="state_dict"):
        read_weights(tmp_path / "w.pth")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights file .*gone\.pth not found; check the path"):
        read_weights(tmp_path / "gone.pth")
    with pytest.raises(UserError, match="found the folder"):
        read_weights(tmp_path)


def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="expected a weights file"):
        read_weights(tmp_path / "pipe")
