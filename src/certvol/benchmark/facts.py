"""What a finished run tells of the paper's claims beside its accuracy: oscillation, correlations of sigma, sigma's course."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from certvol.training.run_folder import RunFolder
from certvol.uncertainty import COMPARED_WITH_SIGMA

END_OF_PRETRAINING = 50  # steps: sigma before the switch is the median of the lines logged in them


def read_facts(files: RunFolder) -> dict[str, float]:
    """Of a finished run, what the claims are about; what it does not tell is left out. OSError, ValueError, KeyError, TypeError
    or the like where its files are damaged."""
    facts: dict[str, float] = {}
    if files.evaluation.exists():
        found = json.loads(files.evaluation.read_text(encoding="utf-8"))
        if found.get("oscillation"):
            facts["oscillation"] = float(found["oscillation"]["total"])
        pearson = (found.get("correlations") or {}).get("pearson") or {}
        facts |= {
            f"correlation {name}": float(pearson[name]) for name in COMPARED_WITH_SIGMA if pearson.get(name) is not None
        }
        if (sigma := found["measures"].get("sigma")) and sigma.get("median") is not None:
            facts["sigma"] = float(sigma["median"])
    if files.journal.history.exists():
        lines = [json.loads(line) for line in files.journal.history.read_text(encoding="utf-8").splitlines()]
        facts |= sigma_course(lines)
    return facts


def sigma_course(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures 3a and b in numbers. How far each domain's sigma lies, in the first cycle of adaptation, below the source's at the
    end of pretraining, as a share; and how much later the target's is back there than the source's, as a share of adaptation."""
    pretraining = [line for line in lines if line["phase"] == "pretrain" and line.get("sigma_source") is not None]
    adaptation = [line for line in lines if line["phase"] == "adapt"]
    courses = {
        domain: [line for line in adaptation if line.get(f"sigma_{domain}") is not None]
        for domain in ("source", "target")
    }
    if not pretraining or not all(course and course[0]["cycle"] == 1 for course in courses.values()):
        return {}
    end = pretraining[-1]["step"] - END_OF_PRETRAINING
    before = statistics.median(line["sigma_source"] for line in pretraining if line["step"] > end)
    if before <= 0:
        return {}
    facts: dict[str, float] = {}
    back: dict[str, float] = {}
    for domain, course in courses.items():
        sigma = [float(line[f"sigma_{domain}"]) for line in course]
        facts[f"drop {domain}"] = 1 - statistics.median(sigma[: sum(line["cycle"] == 1 for line in course)]) / before
        back[domain] = _return(sigma, before, [line["step"] / adaptation[-1]["step"] for line in course])
    return facts | {"lead of source": back["target"] - back["source"]}


def _return(sigma: Sequence[float], before: float, places: Sequence[float]) -> float:
    """Where sigma is back at `before` after it has first been below; 0 where it never was, 1 where it never is back."""
    fallen = next((i for i, value in enumerate(sigma) if value < before), None)
    if fallen is None:
        return 0.0
    return next((place for value, place in zip(sigma[fallen:], places[fallen:], strict=True) if value >= before), 1.0)
