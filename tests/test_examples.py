"""Every example runs from its first line to its last."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = runpy.run_path(str(example))
    assert capsys.readouterr().out
    if "accuracy" in left:  # every adapted model beats the one trained on the source alone
        alone = next(value for name, value in left["accuracy"].items() if "alone" in name)
        adapted = [v for name, v in left["accuracy"].items() if name.endswith("Classifier")]
        assert min(adapted) > alone
