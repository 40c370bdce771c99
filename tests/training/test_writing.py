from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from certvol.training.writing import BackgroundWriter


def test_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path: Path) -> None:
    writer, weights = BackgroundWriter(), torch.zeros(1000)
    for number in range(5):
        writer.write(tmp_path / f"{number}.safetensors", {"weights": weights}, {"number": number})
        weights += 1
    writer.wait()
    for number in range(5):
        assert (load_file(tmp_path / f"{number}.safetensors")["weights"] == number).all()


def test_a_failure_is_told_to_who_waits_and_only_once(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    (tmp_path / "file").write_text("in the way")
    writer.write(tmp_path / "file" / "weights.safetensors", {"weights": torch.zeros(1)}, {})
    with pytest.raises(OSError, match=r"[Nn]ot a directory"):
        writer.wait()
    writer.wait()
