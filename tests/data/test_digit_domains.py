from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data import digit_domains
from certvol.data.digit_domains import DOMAINS, write_digit_domains


@pytest.mark.parametrize("name", ["thin", "lit"])
def test_a_domain_is_the_same_images_every_time_and_not_made_twice(name: str, tmp_path: Path) -> None:
    (first,) = write_digit_domains(tmp_path / "a", [name])
    images = {path.relative_to(first): path.read_bytes() for path in first.rglob("*.png")}
    assert len(images) == (1000 if name == "thin" else 1797)
    assert {path.parts[0] for path in images} == set("0123456789")
    assert Image.open(first / "3" / "0000.png").size == (8, 8)
    stamp = (first / "3" / "0000.png").stat().st_mtime_ns
    assert write_digit_domains(tmp_path / "a", [name]) == [first]
    assert (first / "3" / "0000.png").stat().st_mtime_ns == stamp
    (first / "3" / "0001.png").unlink()
    (second,) = write_digit_domains(tmp_path / "a", [name])
    assert {path.relative_to(second): path.read_bytes() for path in second.rglob("*.png")} == images


def test_pens_differ_as_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digit_domains, "PER_CLASS", 5)
    ink = {name: np.mean([p for _, p in DOMAINS[name](np.random.default_rng(0))]) for name in ("thin", "fonts", "bold")}
    assert ink["thin"] < 0.8 * ink["fonts"]
    assert ink["bold"] > 1.2 * ink["fonts"]


@pytest.mark.parametrize("name", ["turned", "blurred", "ruled", "lit", "stained", "small"])
def test_changed_handwriting_keeps_its_labels_and_range(name: str) -> None:
    plain, changed = DOMAINS["real"](np.random.default_rng(0)), DOMAINS[name](np.random.default_rng(0))
    assert [digit for digit, _ in plain] == [digit for digit, _ in changed]
    values = np.stack([picture for _, picture in changed])
    assert values.min() >= 0
    assert values.max() <= 16
    assert np.abs(values - np.stack([picture for _, picture in plain])).mean() > 0.5
