"""TensorBoard shows the values of history.jsonl."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import certvol
from certvol.errors import UserError
from certvol.runs import tensorboard
from support.images import tiny, write_domain

pytest.importorskip("tensorboard")


def shown(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) -> value, each once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = [
        ((tag, e.step), e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)
    ]
    assert len(dict(found)) == len(found), "a step is shown twice"
    return dict(found)


def logged(history: Path) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    return {
        (f"{line['phase']}/{key}", line["step"]): value
        for line in lines
        for key, value in line.items()
        if key not in ("phase", "step") and value is not None
    }


@pytest.mark.parametrize("norm", ["per_domain", "auto"])
def test_curves_show_the_history(norm: str, tmp_path: Path) -> None:
    """With `auto`, the lines of the chosen trial come in all at once."""
    source = write_domain(tmp_path / "source")
    settings = tiny(training__tensorboard=True, model__norm=norm)
    run = certvol.adapt(source, source, out=tmp_path / "run", **settings)
    expected = logged(run.path / "history.jsonl")
    found = shown(run.path / "tensorboard")
    assert set(found) == set(expected)
    assert ("adapt/sigma_target", 12) in found
    assert found == pytest.approx(expected, rel=1e-5)


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    source = write_domain(tmp_path / "source")
    run = certvol.adapt(source, source, out=tmp_path / "run", **tiny())
    assert not (run.path / "tensorboard").exists()


def test_after_a_resume_no_step_is_shown_twice(tmp_path: Path) -> None:
    """A history that was cut back: what an earlier process had shown beyond the cut is gone."""
    history, folder = tmp_path / "history.jsonl", tmp_path / "tensorboard"
    lines = [{"phase": "adapt", "step": step, "loss": float(step)} for step in (1, 2, 3)]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = tensorboard.TensorBoard(history, folder)
    before.follow()
    before.close()
    history.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    after = tensorboard.TensorBoard(history, folder)
    with history.open("a") as file:
        file.write(json.dumps({"phase": "adapt", "step": 3, "loss": 30.0}) + "\n")
    after.follow()
    with history.open("a") as file:
        file.write(
            json.dumps({"phase": "adapt", "step": 4, "loss": 40.0, "sigma_target": None}) + "\n"
        )
    after.follow()
    after.close()
    assert shown(folder) == {
        ("adapt/loss", step): value for step, value in ((1, 1), (2, 2), (3, 30), (4, 40))
    }


def test_without_the_package_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spec(name: str) -> ModuleSpec | None:
        assert name == "tensorboard"
        return None

    monkeypatch.setattr("certvol.runs.tensorboard.find_spec", spec)
    source = write_domain(tmp_path / "source")
    with pytest.raises(UserError, match=r"certvol\[tensorboard\]"):
        certvol.adapt(source, source, out=tmp_path / "run", **tiny(training__tensorboard=True))
    assert not (tmp_path / "run").exists()
