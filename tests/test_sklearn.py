"""The estimators: scikit-learn's own checks, both ways to give a target, certainty, refusals."""

import io
import pickle
import subprocess
import sys
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from certvol.sklearn import EXPECTED_FAILED_CHECKS, BasicClassifier, CORALClassifier, CVPClassifier
from support.estimators import (
    CLOSED_FORM,
    ESTIMATORS,
    LABELS,
    SOURCE,
    TARGET,
    TRUE,
    X,
    Y,
    equal,
    quick,
    states,
)


@pytest.mark.parametrize("cls", CLOSED_FORM)
def test_scikit_learns_own_checks(cls: type) -> None:
    check_estimator(quick(cls, random_state=None), expected_failed_checks=EXPECTED_FAILED_CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [CVPClassifier, BasicClassifier])
def test_scikit_learns_own_checks_of_the_trained_ones(cls: type) -> None:
    model = quick(cls, pretrain_steps=150, random_state=None)
    check_estimator(model, expected_failed_checks=EXPECTED_FAILED_CHECKS)


def test_each_expected_failure_has_a_reason() -> None:
    assert len(EXPECTED_FAILED_CHECKS) == 1
    assert all(len(reason) > 40 for reason in EXPECTED_FAILED_CHECKS.values())


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_a_target_marked_by_minus_one_or_given_apart_is_the_same(cls: type) -> None:
    marked = quick(cls).fit(X, Y)
    apart = quick(cls).fit(SOURCE, LABELS, X_target=TARGET)
    both = quick(cls).fit(X[: len(SOURCE) + 50], Y[: len(SOURCE) + 50], X_target=TARGET[50:])
    for other in (apart, both):
        assert all(equal(a, b) for a, b in zip(states(marked), states(other), strict=True))


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_the_order_of_the_target_does_not_matter(cls: type) -> None:
    order = np.random.default_rng(3).permutation(len(TARGET))
    first, second = (
        quick(cls).fit(SOURCE, LABELS, X_target=rows) for rows in (TARGET, TARGET[order])
    )
    assert np.allclose(first.predict_proba(X), second.predict_proba(X), atol=1e-9)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_adaptation_helps_on_a_target_that_was_moved(cls: type) -> None:
    adapted = quick(cls, standardize="domain", cycles=10, pretrain_steps=100).fit(X, Y)
    alone = quick(cls, pretrain_steps=100).fit(SOURCE, LABELS)
    assert adapted.score(TARGET, TRUE) > min(0.97, alone.score(TARGET, TRUE) + 0.05)
    assert adapted.score(TARGET, TRUE) > 0.85


@pytest.mark.parametrize("cls", [CVPClassifier, BasicClassifier])
def test_every_rule_labels_the_target_in_its_own_way(cls: type) -> None:
    given = {"standardize": "domain", "pretrain_steps": 100}
    models = {
        rule: quick(cls, pseudo_labels=rule, **given).fit(X, Y)
        for rule in ("argmax", "cluster", "lame", "propagate", "mc_dropout")
    }
    assert cls().pseudo_labels == "cluster"
    assert all(model.score(TARGET, TRUE) > 0.85 for model in models.values())
    assert not equal(models["argmax"].weights_, models["cluster"].weights_)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_labels_may_be_names(cls: type) -> None:
    names = np.array(["ant", "bee", "cat"])
    by_number = quick(cls).fit(X, Y)
    apart = quick(cls).fit(SOURCE, names[LABELS], X_target=TARGET)
    mixed = np.array([*names[LABELS], *[-1] * len(TARGET)], dtype=object)
    for model in (apart, quick(cls).fit(X, mixed), quick(cls).fit(X, mixed.astype(str))):
        assert list(model.classes_) == list(names)
        assert np.array_equal(model.predict(TARGET), names[by_number.predict(TARGET)])


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_a_seed_decides_the_model_and_global_random_numbers_stay(cls: type) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 (the global state is what must not change)
    before = torch.random.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002
    first = quick(cls).fit(X, Y)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before[1])  # noqa: NPY002
    torch.manual_seed(6)
    second = quick(cls).fit(X, Y)
    assert all(equal(a, b) for a, b in zip(states(first), states(second), strict=True))
    if "cycles" in first.get_params():
        assert not np.array_equal(
            first.predict_proba(X), quick(cls, random_state=1).fit(X, Y).predict_proba(X)
        )


def test_certainty_is_larger_where_the_model_is_right() -> None:
    model = quick(CVPClassifier, standardize="domain", pretrain_steps=100, cycles=10).fit(X, Y)
    sigma = model.certainty(TARGET)
    assert sigma.shape == (len(TARGET),)
    assert (sigma > 0).all()
    right = model.predict(TARGET) == TRUE
    if (~right).any():
        assert sigma[right].mean() > sigma[~right].mean()
    far = model.certainty(TARGET[:5])
    assert np.allclose(far, sigma[:5])
    with pytest.raises(AttributeError):
        BasicClassifier().certainty(TARGET)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_pipelines_grids_and_clones(cls: type) -> None:
    pipeline = make_pipeline(StandardScaler(), quick(cls))
    assert pipeline.fit(X, Y).predict(TARGET).shape == (len(TARGET),)
    grid = GridSearchCV(quick(cls), {"standardize": ["joint", "domain"]}, cv=2)
    grid.fit(SOURCE, LABELS, X_target=None)
    assert grid.best_params_["standardize"] in ("joint", "domain")
    copied = clone(quick(cls, standardize="domain"))
    assert copied.get_params() == quick(cls, standardize="domain").get_params()


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_a_saved_estimator_predicts_the_same_and_holds_no_tensors(cls: type) -> None:
    model = quick(cls).fit(X, Y)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    assert np.array_equal(joblib.load(file).predict_proba(TARGET), model.predict_proba(TARGET))
    assert b"torch" not in pickle.dumps(model)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_data_that_cannot_be_fitted_is_refused(cls: type) -> None:
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        quick(cls).fit(sparse.csr_matrix(X), Y)
    with pytest.raises(ValueError, match="NaN"):
        quick(cls).fit(np.where(X[0, 0] == X, np.nan, X), Y)
    with pytest.raises(ValueError, match="NaN"):
        quick(cls).fit(SOURCE, LABELS, X_target=np.full((3, 8), np.nan))
    with pytest.raises(ValueError, match="features"):
        quick(cls).fit(SOURCE, LABELS, X_target=np.zeros((3, 7)))
    with pytest.raises(ValueError, match="at least 2 classes"):
        quick(cls).fit(X, np.where(Y == 0, 0, -1))
    with pytest.raises(ValueError, match="standardize"):
        quick(cls, standardize="both").fit(X, Y)


NAN = float("nan")
WRONG: dict[str, list[Any]] = {
    "num_samples": [-1, 2.5, True, None, "64"],
    "samples_weight": [-0.1, NAN, float("inf"), None],
    "antagonistic": [1, "yes", None],
    "standardize": ["both", True, 1],
    "adapter": [0, "yes"],
    "dropout": [-0.1, 1, NAN, "0"],
    "pretrain_steps": [-1, 1.5],
    "cycles": [-1, 1.5, NAN, None],
    "cycle_steps": [-1, 0.5],
    "batch_size": [3, -4, 2**17, 32.0],
    "learning_rate": [0, -0.1, NAN, float("inf"), "fast"],
    "momentum": [-0.1, 1.0, NAN],
    "weight_decay": [-1, NAN],
    "pseudo_labels": ["kmeans", None, 3],
    "target_prior": ["even", None, 3],
    "reviewed_share": [0, 1, NAN, True],
    "device": ["gpu", 1.5, None, "meta", "cuda:99"],
    "random_state": ["seed"],
    "ridge": [0, -1, NAN, None],
    "C": [0, NAN, "1"],
    "n_components": [0, 1.5],
    "iterations": [0, -1, 2.5],
    "n_neighbors": [0, 1.5, None],
    "target_share": [-0.1, 1.1, NAN],
    "rounds": [0, 2.5],
    "repetitions": [0, "11"],
    "subspaces": [0, 1.5],
    "confidence": [-0.1, 1.5, NAN],
}


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_parameters_of_wrong_type_or_range_are_refused_in_one_sentence(cls: type) -> None:
    assert set(cls().get_params()) <= set(WRONG)
    for name in cls().get_params():
        for value in WRONG[name]:
            with pytest.raises(
                ValueError, match=r"^`?\S+`? (should|cannot) (be|not be) [^\n]+$"
            ) as refused:
                cls(**{name: value}).fit(X, Y)
            assert name in str(refused.value) or name == "random_state"


def test_parameters_may_be_numpy_numbers() -> None:
    given = {
        "num_samples": np.int64(8),
        "learning_rate": np.float32(0.05),
        "cycles": np.uint8(1),
        "adapter": np.True_,
    }
    assert quick(CVPClassifier, **given).fit(X, Y).predict(TARGET).shape == (len(TARGET),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`device` should be a usable device .*no usable CUDA device"
    ):
        quick(CVPClassifier, device="cuda").fit(X, Y)


@pytest.mark.parametrize("cls", ESTIMATORS)
@pytest.mark.parametrize("standardize", ["domain", None])
def test_rows_far_away_get_probabilities_or_are_refused(cls: type, standardize: str | None) -> None:
    model = quick(cls, standardize=standardize).fit(X, Y)
    for size in (1e10, 1e30, 1e60, -1e90):
        found = model.predict_proba(np.concatenate([TARGET[:2] * size, TARGET[:2]]))
        assert np.isfinite(found).all()
        assert np.allclose(found.sum(axis=1), 1)
        assert np.allclose(found[2:], model.predict_proba(TARGET[:2]))
    for size in (1e101, 1e300):
        with pytest.raises(ValueError, match="scale the features down"):
            model.predict(TARGET * size)
        with pytest.raises(ValueError, match="scale the features down"):
            quick(cls, standardize=standardize).fit(SOURCE, LABELS, X_target=TARGET * size)


def test_sigma_of_rows_far_away_is_finite_or_refused() -> None:
    model = quick(CVPClassifier).fit(X, Y)
    assert np.isfinite(model.certainty(TARGET * 1e20)).all()
    with pytest.raises(ValueError, match="sigma of a row overflows"):
        model.certainty(np.concatenate([TARGET, -TARGET]) * 1e60)


def test_rows_too_large_for_training_are_refused() -> None:
    with pytest.raises(ValueError, match="scale the features down"):
        quick(CVPClassifier, standardize=None).fit(X * 1e20, Y)


def test_features_of_any_scale_train(recwarn: pytest.WarningsRecorder) -> None:
    for scale in (1e-6, 1e6):
        model = quick(CVPClassifier, standardize=None, learning_rate=None, pretrain_steps=60).fit(
            SOURCE * scale, LABELS
        )
        assert np.isfinite(model.predict_proba(SOURCE * scale)).all()
    assert (
        quick(CVPClassifier, pretrain_steps=100)
        .fit(SOURCE * 1e6, LABELS)
        .score(SOURCE * 1e6, LABELS)
        > 0.9
    )


def test_after_a_collapse_the_pretrained_model_is_kept_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from certvol.training import model_choice

    monkeypatch.setattr(model_choice, "signs_of_collapse", lambda *a: ["all in one class"])
    with pytest.warns(
        UserWarning, match=r"collapsed at cycle 2 \(all in one class\).*pretrained is kept"
    ):
        model = quick(CVPClassifier).fit(X, Y)
    assert model.collapsed_
    plain = quick(CVPClassifier, cycles=0).fit(X, Y)
    assert equal(model.weights_, plain.weights_)


def test_importing_the_estimators_imports_no_vision_packages() -> None:
    code = (
        "import sys, certvol.sklearn; "
        "heavy = ('timm', 'torchvision', 'PIL.JpegImagePlugin'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_training_that_diverges_is_an_error() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4)), np.arange(30) % 3
    with pytest.raises(ValueError, match="diverged"):
        CVPClassifier(
            pretrain_steps=20, cycles=1, cycle_steps=2, learning_rate=1e9, random_state=0
        ).fit(X, y)


def test_the_order_of_the_target_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    X, y, target = rng.normal(size=(30, 4)), np.arange(30) % 3, rng.normal(size=(20, 4)) + 1
    one, other = (
        CORALClassifier(random_state=0).fit(X, y, X_target=rows).predict_proba(target)
        for rows in (target, target[::-1])
    )
    assert np.array_equal(one, other)


@pytest.mark.parametrize("cls", [CVPClassifier, BasicClassifier])
def test_a_target_prior_rules_classes_out(cls: type) -> None:
    """Rows of the absent class are still predicted as one of the others."""
    model = quick(cls, target_prior={0: 3, 2: 1}).fit(X, Y)
    assert set(model.predict(TARGET)) == {0, 2}
    assert model.predict_proba(TARGET)[:, 1].max() == 0
    assert set(quick(cls).fit(X, Y).predict(TARGET)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("prior", "complaint"),
    [
        ("even", "should be 'unknown'"),
        ({7: 1}, "names 7"),
        ({0: -1, 1: 2}, "shares must be 0 or more"),
        ({0: 0}, "one above 0"),
    ],
)
def test_a_wrong_target_prior_is_refused(prior: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quick(BasicClassifier, target_prior=prior).fit(X, Y)


def test_none_as_a_label_is_refused_with_the_mark_of_unlabelled_rows() -> None:
    X, y = np.eye(4), np.array(["a", "b", None, None], dtype=object)
    with pytest.raises(ValueError, match="mark unlabelled rows by -1"):
        CORALClassifier().fit(X, y)
