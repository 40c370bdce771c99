"""The target prior: read, checked, and obeyed by every part of a run."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from certvol.data.target_prior import ABSENT, TargetPrior, read_prior
from certvol.errors import UserError
from certvol.settings import DataConfig

CLASSES = ["cat", "dog", "owl"]
LABELS = np.array([0] * 6 + [1] * 3 + [2])


def _read(prior: str = "unknown", classes: str | None = None) -> TargetPrior:
    config = DataConfig(target_prior=prior, target_classes=classes)
    return read_prior(config, CLASSES, LABELS)


def _file(folder: Path, *lines: str) -> str:
    path = folder / "prior.csv"
    path.write_text("\n".join(["class,share", *lines]) + "\n")
    return str(path)


def test_nothing_is_known_by_default() -> None:
    prior = _read()
    assert not prior.says_anything
    assert prior.shift(np.full(3, 1 / 3)) is None
    assert prior.classes_expected is None
    assert prior.contradiction(np.array([1.0, 0, 0])) is None


def test_the_shares_of_the_words(tmp_path: Path) -> None:
    balanced, source = _read("balanced"), _read("source")
    assert balanced.shares_C == pytest.approx([1 / 3] * 3)
    assert source.shares_C == pytest.approx([0.6, 0.3, 0.1])
    assert balanced.classes_expected == pytest.approx(3)
    entropy = -sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    assert source.classes_expected == pytest.approx(math.exp(entropy))


def test_a_csv_holds_shares_or_counts_and_leaves_classes_out(tmp_path: Path) -> None:
    prior = _read(_file(tmp_path, "owl,30", "cat,10"))
    assert prior.shares_C == pytest.approx([0.25, 0, 0.75])
    assert prior.allowed_C.tolist() == [True, False, True]


def test_named_classes_rule_the_others_out() -> None:
    prior = _read(classes="owl, cat")
    assert prior.allowed_C.tolist() == [True, False, True]
    assert prior.shares_C is None
    both = _read("source", "owl,dog")
    assert both.shares_C == pytest.approx([0, 0.75, 0.25])


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["cat,1", "dgo,1"], "did you mean `dog`"),
        (["cat,1", "cat,2"], "names `cat` twice"),
        (["cat,0", "cat,2"], "names `cat` twice"),
        (["cat,-1"], "the share of `cat` must be a number, 0 or more"),
        (["cat,nan"], "the share of `cat` must be a number, 0 or more"),
        (["cat,many"], "the share of `cat` must be a number, 0 or more"),
        (["cat"], "the share of `cat` must be a number, 0 or more"),
        (["cat,1,5", "dog,2,5"], "line 2 has more cells than the first line"),
        (["cat,0"], "no class a share above 0"),
        ([], "no class a share above 0"),
    ],
)
def test_a_wrong_csv_is_explained(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        _read(_file(tmp_path, *lines))


def test_other_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*balanced"):
        _read(str(tmp_path / "ballanced"))
    (tmp_path / "bad.csv").write_text("cat,1\n")
    with pytest.raises(UserError, match="begin with the line `class,share`"):
        _read(str(tmp_path / "bad.csv"))
    (tmp_path / "bad.csv").write_text("class,share,share\ncat,1,5\n")
    with pytest.raises(UserError, match="begin with the line `class,share`"):
        _read(str(tmp_path / "bad.csv"))
    with pytest.raises(UserError, match="did you mean `owl`"):
        _read(classes="cat,owls")
    with pytest.raises(UserError, match="leaves no class"):
        _read(_file(tmp_path, "cat,1"), "dog")


def test_the_shift_turns_posteriors_into_those_of_the_prior() -> None:
    """Bayes: p(c | x) under new shares is p(c | x) * new / old, normalised."""
    prior = TargetPrior(np.array([True, False, True]), np.array([0.2, 0, 0.8]))
    trained_C, posterior_C = np.array([0.5, 0.2, 0.3]), np.array([0.7, 0.2, 0.1])
    expected_C = posterior_C * prior.shares_C / trained_C
    shift_C = prior.shift(trained_C)
    assert shift_C is not None
    shifted_C = (torch.from_numpy(posterior_C).log() + shift_C).softmax(0)
    assert shifted_C.tolist() == pytest.approx((expected_C / expected_C.sum()).tolist(), abs=1e-6)


def test_named_classes_only_rule_out() -> None:
    shift_C = TargetPrior(np.array([True, False, True])).shift(np.array([0.7, 0.2, 0.1]))
    assert shift_C is not None
    assert shift_C.tolist() == [0, ABSENT, 0]


def test_a_prior_far_from_the_predictions_is_contradicted() -> None:
    only_cats = TargetPrior(np.array([True, False, False]))
    assert only_cats.contradiction(np.array([0.5, 0.5, 0])) is None
    found = only_cats.contradiction(np.array([0.4, 0.5, 0.1]))
    assert found is not None
    assert "60 %" in found
    even = TargetPrior(np.ones(3, dtype=bool), np.full(3, 1 / 3))
    assert even.contradiction(np.array([0.8, 0.1, 0.1])) is None
    found = even.contradiction(np.array([0.9, 0.1, 0.0]))
    assert found is not None
    assert "57 %" in found


def test_fingerprints_tell_priors_apart() -> None:
    found = {
        prior.fingerprint
        for prior in (_read(), _read("source"), _read("balanced"), _read(classes="cat"))
    }
    assert len(found) == 4
