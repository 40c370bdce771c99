"""Keep what a run's verdict is made from, so that the present code can judge it again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np


def evidence_file(out: Path, key: str) -> Path:
    return out / "evidence" / f"{key.replace('/', '--')}.npz"


@dataclass
class Recorded:
    """What the runs of a `with recording()` block predicted, newest last."""

    outcomes: list[tuple[Sequence[str], Sequence[str], Any]] = field(default_factory=list)
    """Paths, classes and `Outcome` of each run."""

    def write(self, file: Path, truth: Mapping[str, str]) -> None:
        """Write the newest run's evidence; `truth` holds the class of every path."""
        paths, classes, outcome = self.outcomes[-1]
        number = {name: i for i, name in enumerate(classes)}
        measured = {f"measure_{k}": v for k, v in outcome.adapted.measures.items()}
        measured.pop("measure_logit_gt", None)  # it needs labels
        evidence = {f"evidence_{k}": v for k, v in vars(outcome.evidence).items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            file,
            true_N=np.array([number.get(truth[path], -1) for path in paths]),
            shown_K=outcome.shown_K,
            predicted_N=outcome.adapted.labels_N,
            **evidence,
            **measured,
        )


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record the outcomes of runs, and measure no oscillation, which takes long."""
    from certvol import api
    from certvol.predict import measures
    from certvol.predict.outcome import run_target

    found = Recorded()

    def recorded(run: Any, model: Any, target: Any, *others: Any) -> Any:
        outcome = run_target(run, model, target, *others)
        found.outcomes.append((target.paths, model.classes, outcome))
        return outcome

    with (
        mock.patch.object(api, "run_target", recorded),
        mock.patch.object(measures, "oscillation_is_cheap", return_value=False),
    ):
        yield found
