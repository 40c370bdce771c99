"""Every example runs from its first line to its last."""

import re
from pathlib import Path

import pytest

from site_examples import EXAMPLES, outputs

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_there_are_examples() -> None:
    assert SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    """`make docs` keeps what they print, so that `make test` runs them once."""
    printed = "\n".join(outputs(example))
    assert printed
    found = re.findall(r"^(.*?) {2,}([\d.]+) % ", printed, re.MULTILINE)
    if found:  # every adapted model beats the one trained on the source alone
        accuracy = {name: float(percent) for name, percent in found}
        alone = next(value for name, value in accuracy.items() if "alone" in name)
        adapted = [v for name, v in accuracy.items() if name.endswith("Classifier")]
        assert min(adapted) > alone
