"""What is in two files of features and what is wrong with them, before any training: `certvol check` for .npz files."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.data.check import CheckReport, Finding, about_counts, about_names, in_order
from certvol.data.feature_files import (
    SourceFeatures,
    TargetFeatures,
    check_alike,
    is_feature_file,
    known_labels,
    open_source_features,
    open_target_features,
    other_is_no_file,
    row_hashes,
)
from certvol.data.folders import printable
from certvol.errors import UserError

Place = str | os.PathLike[str]


def check_features(source: Place, target: Place) -> CheckReport:
    """For places of which one or both are files of features. UserError only where one does not exist."""
    for place in (source, target):
        if not Path(place).exists():
            raise UserError(f"there is no file or folder {printable(str(place))}")
    findings: list[Finding] = []
    if (problem := other_is_no_file([source, target])) is not None:
        findings.append(Finding("error", problem))
    found_source, found_target = _open_source(source, findings), _open_target(target, findings)
    counts: dict[str, int] = {}
    if found_source is not None:
        numbers = np.bincount(found_source.labels, minlength=len(found_source.classes))
        counts = {name: int(count) for name, count in zip(found_source.classes, numbers, strict=True)}
        findings += about_counts(counts)
        findings += about_names(found_source.classes)
    duplicates = [_duplicates(found) for found in (found_source, found_target)]
    findings += [
        _repeated(which, groups) for which, groups in zip(("source", "target"), duplicates, strict=True) if groups
    ]
    in_both = []
    if found_source is not None and found_target is not None:
        findings += _about_both(found_source, found_target, target)
        in_both = _in_both(found_source, found_target)
    if in_both:
        names = " and ".join(map(printable, in_both[0]))
        text = f"{len(in_both)} rows of the target have the very features of a source row (such as {names})"
        findings.append(Finding("warning", f"{text}, so accuracy on the target will look too good; remove them"))
    return CheckReport(
        source_counts=counts,
        target_count=0 if found_target is None else len(found_target),
        findings=in_order(findings),
        source_duplicates=duplicates[0],
        target_duplicates=duplicates[1],
        in_both=in_both,
    )


def _open_source(place: Place, findings: list[Finding]) -> SourceFeatures | None:
    try:
        return open_source_features(place) if is_feature_file(place) else None
    except UserError as error:
        findings.append(Finding("error", f"source: {error}"))
        return None


def _open_target(place: Place, findings: list[Finding]) -> TargetFeatures | None:
    try:
        return open_target_features(place) if is_feature_file(place) else None
    except UserError as error:
        findings.append(Finding("error", f"target: {error}"))
        return None


def _about_both(source: SourceFeatures, target: TargetFeatures, place: Place) -> list[Finding]:
    found: list[Finding] = []
    try:
        check_alike(source, target)
    except UserError as error:
        found.append(Finding("error", str(error)))
    try:
        labelled = known_labels(place, target.rows, source.classes) is not None
    except UserError as error:
        return [*found, Finding("error", f"target: {error}")]
    if labelled:
        text = "target: every row has a label that is a source class; accuracy is measured by them after training"
        found.append(Finding("note", f"{text}, which never sees them"))
    return found


def _hashes(found: TargetFeatures) -> npt.NDArray[np.void]:
    """Of each row, in the order of its names."""
    hashes = row_hashes(found.features)[found.rows]
    return np.ascontiguousarray(hashes).view(np.dtype((np.void, hashes.shape[1]))).ravel()


def _duplicates(found: TargetFeatures | None) -> list[list[str]]:
    if found is None:
        return []
    _, group_of_N, counts = np.unique(_hashes(found), return_inverse=True, return_counts=True)
    groups: dict[int, list[str]] = {int(group): [] for group in np.flatnonzero(counts > 1)}
    for name, group in zip(found.paths, group_of_N, strict=True):
        if int(group) in groups:
            groups[int(group)].append(name)
    return sorted(sorted(group) for group in groups.values())


def _repeated(which: str, groups: list[list[str]]) -> Finding:
    extra = sum(len(group) - 1 for group in groups)
    shown = f"{printable(groups[0][0])} and {printable(groups[0][1])}"
    text = f"{which}: {extra} rows repeat the features of another (such as {shown}); they count as often as they occur"
    return Finding("warning", text)


def _in_both(source: SourceFeatures, target: TargetFeatures) -> list[tuple[str, str]]:
    _, in_source, in_target = np.intersect1d(_hashes(source), _hashes(target), return_indices=True)
    return sorted((source.paths[i], target.paths[j]) for i, j in zip(in_source, in_target, strict=True))
