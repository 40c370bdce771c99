import os
from pathlib import Path

import pytest

from certvol.errors import UserError
from certvol.settings import flatten
from certvol.settings.resolve import read_settings_file


def refusal(text: str, file: Path) -> str:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_settings_file(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "training:\n  cycles: 3\ntraining:\n  seed: 2\n",
        "training:\n  cycles: 3\n  cycles: 4\n",
        "training.cycles: 3\ntraining:\n  cycles: 4\n",
        "method: cvp\nmethod.name: basic\n",
    ],
)
def test_a_setting_given_twice_is_refused(text: str, tmp_path: Path) -> None:
    assert "given twice" in refusal(text, tmp_path / "settings.yaml")


def test_a_setting_given_twice_from_python_is_refused() -> None:
    with pytest.raises(UserError, match="given twice"):
        flatten({"training": {"cycles": 3}, "training.cycles": 4}, "settings")


def test_merge_keys_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    for i in range(1, 27):
        lines += [f"a{i}: &a{i}", f"  <<: [{', '.join([f'*a{i - 1}'] * 4)}]"]
    assert "merge keys" in refusal("\n".join(lines), tmp_path / "settings.yaml")


def test_many_aliases_and_large_files_are_refused(tmp_path: Path) -> None:
    many = "a: &a [1]\nb: [" + ", ".join(["*a"] * 1001) + "]\n"
    assert "aliases" in refusal(many, tmp_path / "settings.yaml")
    assert "larger than" in refusal("#" * 1_000_001, tmp_path / "settings.yaml")


def test_a_merge_key_still_works(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: &t\n  cycles: 3\nguard:\n  <<: *t\n  cycles: 4\n")
    assert read_settings_file(file) == {"training.cycles": 3, "guard.cycles": 4}


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="pipe or a device"):
            read_settings_file(place)
