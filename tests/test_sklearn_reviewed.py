"""The estimators take target rows with labels, told from the source by `domain`."""

from typing import Any

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from certvol.sklearn import CORALClassifier, CVPClassifier
from support.estimators import ESTIMATORS, LABELS, SOURCE, TARGET, TRUE, X, Y, equal, quick, states

DOMAIN = np.repeat([0, 1], [len(SOURCE), len(TARGET)])


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_labelled_target_rows_train(cls: type) -> None:
    """The target is turned round, so that only labels of some of its rows say what is what."""
    turned, half = TARGET[:, ::-1] + 5, np.where(np.arange(len(TRUE)) % 2 == 0, TRUE, -1)
    rows, settings = np.concatenate([SOURCE, turned]), {"cycles": 15, "pretrain_steps": 100}
    without = quick(cls, **settings).fit(rows, Y)
    reviewed = quick(cls, **settings).fit(rows, np.concatenate([LABELS, half]), domain=DOMAIN)
    assert reviewed.score(turned, TRUE) > max(0.6, without.score(turned, TRUE))


@pytest.mark.parametrize("cls", [CVPClassifier, CORALClassifier])
def test_a_domain_without_target_labels_changes_nothing(cls: type) -> None:
    marked, told = quick(cls).fit(X, Y), quick(cls).fit(X, Y, domain=DOMAIN)
    assert all(equal(a, b) for a, b in zip(states(marked), states(told), strict=True))
    pipeline = make_pipeline(StandardScaler(), quick(cls)).fit(
        X, Y, **{f"{cls.__name__.lower()}__domain": DOMAIN}
    )
    assert pipeline.predict(TARGET).shape == TRUE.shape


@pytest.mark.parametrize(
    ("labels", "domain", "complaint"),
    [
        (Y, DOMAIN[:-1], "one value per row"),
        (Y, DOMAIN + 1, "should be 0 for rows of the source"),
        (Y, np.zeros(len(Y)), "has no label"),
        (np.where(DOMAIN == 1, 7, Y), DOMAIN, "label .*7.*, which no source row has"),
        (np.where(DOMAIN == 1, 0, Y), 1 - DOMAIN, "at least 2 classes"),
    ],
)
def test_a_domain_that_does_not_fit_is_refused(labels: Any, domain: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quick(CORALClassifier).fit(X, labels, domain=domain)
