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
from pathlib import Path
from typing import Any, Literal

import numpy as np

from certvol.data import Indices
from certvol.data.folders import printable
from certvol.predict.estimates import (
    Evidence,
    estimates,
    target_accuracy,
    temperatures,
    with_labels,
)
from certvol.predict.forward import Values
from certvol.predict.max_error import Judged
from certvol.progress import percent
from certvol.runs.checkpoint import FORMAT, check_format, damage_explained
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
    estimators = estimates(evidence)
    accuracy = target_accuracy(estimators)
    if judged is not None:
        accuracy = with_labels(accuracy, USUAL_ERROR, judged.right, judged.labels)
    before_N, after_N = evidence.before_NC.argmax(axis=1), evidence.after_NC.argmax(axis=1)
    before_C, after_C = (
        np.bincount(labels_N, minlength=evidence.num_classes).tolist()
        for labels_N in (before_N, after_N)
    )
    images, changed = len(after_N), int((before_N != after_N).sum())
    figures = {
        "images": images,
        "target_images": images if target_images is None else target_images,
        "source": {
            "images": len(evidence.labels_S),
            "before": _source_accuracy(evidence.before_SC, evidence.labels_S),
            "after": _source_accuracy(evidence.after_SC, evidence.labels_S),
        },
        "changed": {"images": changed, "share": changed / max(1, images)},
        "classes": {
            name: {"before": before, "after": after}
            for name, before, after in zip(classes, before_C, after_C, strict=True)
        },
        "accuracy": {
            "estimate": accuracy,
            "usual_error": USUAL_ERROR,
            "estimators": estimators,
            "labels": 0 if judged is None else judged.labels,
        },
    }
    found = reasons(figures, evidence)
    word, first = found[0]
    pretrained, delivered = temperatures(evidence, accuracy)
    return {
        "format": FORMAT,
        "verdict": word,
        "line": f"{word}: {first}",
        "reasons": [text for _, text in found],
        **figures,
        "temperature": {"pretrained": pretrained, "delivered": delivered},
    }


def _source_accuracy(probabilities_SC: Values, labels_S: Indices) -> float | None:
    """Return the accuracy on held-out source images; None without predictions of them."""
    if len(probabilities_SC) == 0:
        return None
    return float((probabilities_SC.argmax(axis=1) == labels_S).mean())


def reasons(figures: Mapping[str, Any], evidence: Evidence) -> list[tuple[Word, str]]:
    """Return all reasons for and against using the model, the most serious first.

    `figures` holds the keys of verdict.json that are measured.
    """
    found: list[tuple[Word, str]] = []
    use, look, bad = WORDS
    source = figures["source"]
    held_out, before, after = source["images"], source["before"], source["after"]
    if pretraining_warning(before, held_out, evidence.num_classes) is not None:
        right = percent(before, 0)
        found.append(
            (bad, f"the source was not learnt: {right} % of its held-out images are correct")
        )
    if before is not None and after is not None and after < LOST_SOURCE * before:
        fall = f"{percent(before, 0)} % to {percent(after, 0)} %"
        found.append((bad, f"accuracy on held-out source images fell from {fall}"))
    in_use = classes_in_use(evidence.after_NC)
    # A class that the target prior rules out has no probability.
    possible = int((evidence.after_NC > 0).any(axis=0).sum())
    if possible > 1 and in_use < max(FEW_CLASSES * possible, ALMOST_ONE_CLASS):
        found.append((look, _few_classes(figures)))
    accuracy = figures["accuracy"]["estimate"]
    share = f"an estimated {percent(accuracy, 0)} % of the predictions are correct"
    if accuracy < TOO_POOR:
        found.append((bad, share))
    elif accuracy < GOOD_ENOUGH:
        found.append((look, f"{share}; look at the least certain images"))
    if in_use > SPREADING * classes_in_use(evidence.before_NC):
        gains = {name: _gain(counts) for name, counts in figures["classes"].items()}
        most = sorted(gains, key=lambda name: -gains[name])[:NAMED_CLASSES]
        grown = ", ".join(printable(name) for name in most if gains[name] > 0)
        found.append((look, f"adaptation predicts more classes than before; look at {grown}"))
    if (changed := figures["changed"]["share"]) > MANY_CHANGED:
        text = f"adaptation changed {percent(changed, 0)} % of the predictions"
        found.append((look, f"{text}; look at some of them"))
    if (images := figures["images"]) < HANDFUL:
        found.append((look, f"{images} target images are too few to judge; look at all of them"))
    if held_out < MIN_HELD_OUT:
        found.append((look, _too_few_held_out(held_out)))
    if not found:
        found.append((use, share))
    return sorted(found, key=lambda each: -WORDS.index(each[0]))


def _few_classes(figures: Mapping[str, Any]) -> str:
    """Name the class that most images fall into; the estimate cannot notice such a collapse."""
    name, counts = max(figures["classes"].items(), key=lambda each: int(each[1]["after"]))
    share = percent(counts["after"] / max(1, figures["images"]), 0)
    return (
        f"{share} % of the predictions are {printable(name)}; if the target has more classes, do "
        "not use the model"
    )


def _too_few_held_out(images: int) -> str:
    if images == 0:
        return "no source images are held out, so accuracy was not measured; raise `data.holdout`"
    are = "image is" if images == 1 else "images are"
    return (
        f"only {images} source {are} held out, too few to measure accuracy; raise `data.holdout` "
        "or add source images"
    )


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
    with damage_explained(file):
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["verdict"] not in WORDS:
            raise ValueError(f"unknown verdict {found['verdict']!r}")
        check_format(found.get("format"))
        return dict(found)
