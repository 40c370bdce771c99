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
    if "accuracy" in left:  # all of them adapt better than the source alone does
        alone = next(value for name, value in left["accuracy"].items() if "alone" in name)
        assert min(value for name, value in left["accuracy"].items() if name.endswith("Classifier")) > alone
