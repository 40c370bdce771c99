"""Say without labels whether a run's model can be used: the rule, and RUN/verdict.json.

`docs/results/verdict.md` measures how often the rule is right, and how far the estimate is off.

    verdict, line, reasons   the word, one line with its main reason, and all reasons
    images                   how many target images were compared before and after: all, or a sample
    target_images            how many images the target has; missing in files of older versions
    source                   held-out source images, and the accuracy of both models on them
    changed                  how many predictions adaptation changed
    classes                  class -> predicted images before, after
    accuracy                 estimate for the target, its usual error, and every single estimator
    temperature              what the logits of each model are divided by
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.predict.estimates import (
    EstimatesByName,
    estimates,
    target_accuracy,
    temperatures,
    with_labels,
)
from certvol.predict.evidence import Evidence
from certvol.predict.max_error import Judged
from certvol.progress import percent
from certvol.runs.checkpoint import DAMAGE, FORMAT, OtherFormat, check_format
from certvol.scores.validators import MIN_HELD_OUT, classes_in_use, pretraining_warning

Word = Literal["use it", "look first", "do not use it"]
WORDS: tuple[Word, ...] = ("use it", "look first", "do not use it")
GOOD_ENOUGH, TOO_POOR = 0.8, 0.5  # estimated target accuracy
USUAL_ERROR = 0.11  # of the estimate, see docs/results/verdict.md
MANY_CHANGED = 0.3  # of the predictions
SPREADING = 1.3  # times as many classes in use as before
FEW_CLASSES, ALMOST_ONE_CLASS = 0.25, 1.2  # share of the classes in use; effective number
HANDFUL = 30  # target images
LOST_SOURCE = 0.75  # of the pretrained model's accuracy on held-out source images
NAMED_CLASSES = 3


@dataclass(frozen=True)
class Facts:
    """The figures that the rule uses."""

    images: int
    num_classes: int
    possible_classes: int
    """Classes that the target prior allows."""
    held_out: int
    source_before: float | None
    source_after: float | None
    """None for a method in closed form too."""
    changed: int
    counts_before: list[int]
    counts_after: list[int]
    in_use_before: float
    """Effective number of predicted classes."""
    in_use_after: float
    estimates: EstimatesByName
    accuracy: float
    """The estimate for the target."""

    @property
    def changed_share(self) -> float:
        return self.changed / max(1, self.images)


def facts_of(evidence: Evidence, judged: Judged | None = None) -> Facts:
    before_N, after_N = evidence.before_NC.argmax(axis=1), evidence.after_NC.argmax(axis=1)
    found = estimates(evidence)
    accuracy = target_accuracy(found)

    def source_accuracy(probabilities_SC: Any) -> float | None:
        if len(probabilities_SC) == 0:
            return None
        return float((probabilities_SC.argmax(axis=1) == evidence.labels_S).mean())

    def counts(labels_N: Any) -> list[int]:
        return [int(n) for n in np.bincount(labels_N, minlength=evidence.num_classes)]

    return Facts(
        images=len(after_N),
        num_classes=evidence.num_classes,
        possible_classes=int((evidence.after_NC > 0).any(axis=0).sum()),
        held_out=len(evidence.labels_S),
        source_before=source_accuracy(evidence.before_SC),
        source_after=source_accuracy(evidence.after_SC),
        changed=int((before_N != after_N).sum()),
        counts_before=counts(before_N),
        counts_after=counts(after_N),
        in_use_before=classes_in_use(evidence.before_NC),
        in_use_after=classes_in_use(evidence.after_NC),
        estimates=found,
        accuracy=accuracy if judged is None else _corrected(accuracy, judged),
    )


def _corrected(accuracy: float, judged: Judged) -> float:
    return with_labels(accuracy, USUAL_ERROR, judged.right, judged.labels)


def reasons(facts: Facts, classes: Sequence[str]) -> list[tuple[Word, str]]:
    """Return all reasons for and against using the model, the most serious first."""
    found: list[tuple[Word, str]] = []
    bad, look = WORDS[2], WORDS[1]
    if pretraining_warning(facts.source_before, facts.held_out, facts.num_classes) is not None:
        right = percent(facts.source_before, 0)
        found.append(
            (bad, f"the source was not learnt: {right} % of its held-out images are correct")
        )
    before, after = facts.source_before, facts.source_after
    if before is not None and after is not None and after < LOST_SOURCE * before:
        fall = f"{percent(before, 0)} % to {percent(after, 0)} %"
        found.append((bad, f"accuracy on held-out source images fell from {fall}"))
    few = max(FEW_CLASSES * facts.possible_classes, ALMOST_ONE_CLASS)
    if facts.possible_classes > 1 and facts.in_use_after < few:
        found.append((look, _few_classes(facts, classes)))
    share = f"an estimated {percent(facts.accuracy, 0)} % of the predictions are correct"
    if facts.accuracy < TOO_POOR:
        found.append((bad, share))
    elif facts.accuracy < GOOD_ENOUGH:
        found.append((look, f"{share}; look at the least certain images"))
    if facts.in_use_after > SPREADING * facts.in_use_before:
        grown = ", ".join(_grown(facts, classes))
        found.append((look, f"adaptation predicts more classes than before; look at {grown}"))
    if facts.changed_share > MANY_CHANGED:
        text = f"adaptation changed {percent(facts.changed_share, 0)} % of the predictions"
        found.append((look, f"{text}; look at some of them"))
    if facts.images < HANDFUL:
        found.append(
            (look, f"{facts.images} target images are too few to judge; look at all of them")
        )
    if facts.held_out < MIN_HELD_OUT:
        found.append((look, _too_few_held_out(facts.held_out)))
    if not found:
        found.append((WORDS[0], share))
    return sorted(found, key=lambda each: -WORDS.index(each[0]))


def _few_classes(facts: Facts, classes: Sequence[str]) -> str:
    """Name the class that most images fall into; the estimate cannot notice such a collapse."""
    most = int(np.argmax(facts.counts_after))
    share = percent(facts.counts_after[most] / max(1, facts.images), 0)
    return (
        f"{share} % of the predictions are {printable(classes[most])}; if the target has more "
        "classes, do not use the model"
    )


def _too_few_held_out(images: int) -> str:
    if images == 0:
        return "no source images are held out, so accuracy was not measured; raise `data.holdout`"
    are = "image is" if images == 1 else "images are"
    return (
        f"only {images} source {are} held out, too few to measure accuracy; raise `data.holdout` "
        "or add source images"
    )


def _grown(facts: Facts, classes: Sequence[str]) -> list[str]:
    gain_C = np.subtract(facts.counts_after, facts.counts_before)
    return [classes[i] for i in np.argsort(-gain_C, kind="stable")[:NAMED_CLASSES] if gain_C[i] > 0]


def make_verdict(
    evidence: Evidence,
    classes: Sequence[str],
    judged: Judged | None = None,
    target_images: int | None = None,
) -> dict[str, Any]:
    """Return the content of verdict.json.

    `judged` are the random labels that the run was given. `target_images` is the size of the target
    that the evidence's images were sampled from; None if they are the whole target.
    """
    facts = facts_of(evidence, judged)
    found = reasons(facts, classes)
    word = found[0][0]
    before, after = temperatures(evidence, facts.accuracy)
    return {
        "format": FORMAT,
        "verdict": word,
        "line": f"{word}: {found[0][1]}",
        "reasons": [text for _, text in found],
        "images": facts.images,
        "target_images": facts.images if target_images is None else target_images,
        "source": {
            "images": facts.held_out,
            "before": facts.source_before,
            "after": facts.source_after,
        },
        "changed": {"images": facts.changed, "share": facts.changed_share},
        "classes": {
            name: {"before": before, "after": after}
            for name, before, after in zip(
                classes, facts.counts_before, facts.counts_after, strict=True
            )
        },
        "accuracy": {
            "estimate": facts.accuracy,
            "usual_error": USUAL_ERROR,
            "estimators": facts.estimates,
            "labels": 0 if judged is None else judged.labels,
        },
        "temperature": {"pretrained": before, "delivered": after},
    }


def describe(verdict: Mapping[str, Any]) -> list[str]:
    """Return the verdict as lines of text, its one line first."""
    source, changed, images = verdict["source"], verdict["changed"], verdict["images"]
    lines = [f"verdict: {verdict['line']}", *(f"  also: {why}" for why in verdict["reasons"][1:])]
    accuracy = verdict["accuracy"]
    basis = f"usually within {percent(accuracy['usual_error'], 0)} points; no labels were used"
    if labels := accuracy.get("labels", 0):
        basis = (
            f"on new images like the target's; from {labels} random labels and what is known "
            "without them"
        )
    lines.append(f"estimated target accuracy: {percent(accuracy['estimate'], 0)} % ({basis})")
    if source["images"]:
        after = f", {percent(source['after'])} % after" if source["after"] is not None else ""
        lines.append(
            f"accuracy on {source['images']} held-out source images: {percent(source['before'])} % "
            f"before adaptation{after}"
        )
    sampled = "sampled " if verdict.get("target_images", images) > images else ""
    counted = "predictions of sampled images per class" if sampled else "predicted images per class"
    moved = _moved(verdict["classes"])
    lines.append(
        f"adaptation changed {changed['images']:,} of {images:,} {sampled}predictions "
        f"({percent(changed['share'], 0)} %)" + (f"; {counted}: {moved}" if moved else "")
    )
    return lines


def _moved(classes: Mapping[str, Mapping[str, int]]) -> str:
    """Name the classes whose number of predictions changed most: `mug 12 to 30, pen 40 to 22`."""
    by_change = sorted(classes, key=lambda name: -abs(_gain(classes[name])))
    named = [
        f"{printable(name)} {classes[name]['before']} to {classes[name]['after']}"
        for name in by_change[:NAMED_CLASSES]
        if _gain(classes[name])
    ]
    return ", ".join(named)


def _gain(counts: Mapping[str, int]) -> int:
    return counts["after"] - counts["before"]


def read_verdict(file: Path) -> dict[str, Any]:
    """Read verdict.json; UserError if it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["verdict"] not in WORDS:
            raise ValueError(f"unknown verdict {found['verdict']!r}")
        check_format(found.get("format"))
        return dict(found)
    except OtherFormat as error:
        raise UserError(f"{file} {error}") from None
    except DAMAGE as error:
        raise UserError(f"{file} is damaged: {error}") from None
