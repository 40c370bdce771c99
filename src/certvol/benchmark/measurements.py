"""Read a run's figures for the paper's claims: oscillation, sigma and its correlations."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from certvol.runs.folder import RunFolder
from certvol.scores.uncertainty import COMPARED_WITH_SIGMA

END_OF_PRETRAINING = 50  # steps; the median sigma over them is compared with adaptation


def read_measurements(files: RunFolder) -> dict[str, float]:
    """Return the figures that a finished run holds; others are missing.

    Damaged files raise OSError, ValueError, KeyError or TypeError.
    """
    found: dict[str, float] = {}
    if files.evaluation.exists():
        evaluation = json.loads(files.evaluation.read_text(encoding="utf-8"))
        if oscillation := evaluation.get("oscillation"):
            found["oscillation"] = float(oscillation["total"])
        pearson = (evaluation.get("correlations") or {}).get("pearson") or {}
        for name in COMPARED_WITH_SIGMA:
            if pearson.get(name) is not None:
                found[f"correlation {name}"] = float(pearson[name])
        sigma = evaluation["measures"].get("sigma") or {}
        if sigma.get("median") is not None:
            found["sigma"] = float(sigma["median"])
    if files.journal.history.exists():
        text = files.journal.history.read_text(encoding="utf-8")
        found |= sigma_course(list(map(json.loads, text.splitlines())))
    return found


def sigma_course(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summarise the paper's figures 3a and 3b from the lines of `history.jsonl`.

    `drop source` and `drop target` say how far sigma falls in the first cycle of adaptation, as a
    share of the source's sigma at the end of pretraining. `lead of source` says how much earlier
    the source's sigma returns to that level than the target's, as a share of adaptation.
    """
    has_sigma = [line for line in lines if line.get("sigma_source") is not None]
    pretraining = [line for line in has_sigma if line["phase"] == "pretrain"]
    adaptation = [line for line in lines if line["phase"] == "adapt"]
    if not pretraining:
        return {}
    end = pretraining[-1]["step"] - END_OF_PRETRAINING
    before = statistics.median(line["sigma_source"] for line in pretraining if line["step"] > end)
    drop, back = {}, {}
    for domain in ("source", "target"):
        name = f"sigma_{domain}"
        course = [line for line in adaptation if line.get(name) is not None]
        if before <= 0 or not course or course[0]["cycle"] != 1:
            return {}
        first = statistics.median(line[name] for line in course if line["cycle"] == 1)
        drop[f"drop {domain}"] = 1 - first / before
        sigma = [line[name] for line in course]
        places = [line["step"] / adaptation[-1]["step"] for line in course]
        back[domain] = _return(sigma, before, places)
    return drop | {"lead of source": back["target"] - back["source"]}


def _return(sigma: Sequence[float], before: float, places: Sequence[float]) -> float:
    """Return the place where sigma returns to `before` after falling below it.

    0 if it never falls, 1 if it never returns.
    """
    fallen = False
    for value, place in zip(sigma, places, strict=True):
        if fallen and value >= before:
            return place
        fallen = fallen or value < before
    return 1.0 if fallen else 0.0
