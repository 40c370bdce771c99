"""The targets for an H200, and whether measured figures reach them."""

from typing import Any

from bench import Figures

# Name, path to the figure, at least or at most, target.
BARS: list[tuple[str, str, str, float]] = [
    ("ceiling, basic, images/s", "steps/basic/images_per_second", ">=", 5000),
    ("cvp M=64 step, x basic", "steps/cvp M=64/step_time_to_basic", "<=", 1.05),
    ("cvp M=256 step, x basic", "steps/cvp M=256/step_time_to_basic", "<=", 1.15),
    (
        "training less labelling, x ceiling",
        "end_to_end/cvp M=64/to_ceiling_without_labelling",
        ">=",
        0.9,
    ),
    ("training, x ceiling", "end_to_end/cvp M=64/to_ceiling", ">=", 0.8),
    ("inference, images/s", "inference/images_per_second", ">=", 20_000),
    ("forwarded, 72k, rarest 2 %, 50 steps", "labelling/50 steps", "<=", 0.25),
    ("forwarded, 72k, rarest 2 %, 5 steps", "labelling/5 steps", "<=", 0.05),
    ("oscillation, s", "oscillation/seconds", "<=", 30),
    (
        "training less labelling, x conventional",
        "conventional/cvp M=64/ours_less_labelling_to_this",
        ">=",
        3,
    ),
    (
        "a cycle, 20k target, rarest 2 %, x faster",
        "conventional/cvp M=64/our_cycle_to_this",
        ">=",
        3,
    ),
    ("whole run, rarest 2 %, x conventional", "whole_run/2 %/to_conventional", "<=", 0.2),
]


def against_bars(parts: Figures) -> list[Figures]:
    """Compare each figure that was measured; for the simulated walks, the longest."""
    shares = {
        f"{p['steps']} steps": p["most_share"]
        for p in parts.get("labelling", {}).get("curve", [])
        if (p["target"], p["rarest"]) == (72_000, "2 %")
    }
    found = []
    for name, path, sign, bar in BARS:
        value: Any = {**parts, "labelling": shares}
        for key in path.split("/"):
            value = value.get(key, {})
        if isinstance(value, float):
            met = value >= bar if sign == ">=" else value <= bar
            found.append({"name": name, "value": value, "bar": f"{sign} {bar:g}", "met": met})
    return found
