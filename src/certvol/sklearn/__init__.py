"""Scikit-learn estimators that adapt feature matrices, with the training of `certvol adapt`.

Unlabelled target rows have the label -1, scikit-learn's convention for semi-supervised learning, or
are given as `X_target`. The classifiers are for the target: `predict` expects rows of the target.
"""

from certvol.sklearn._closed_form import (
    AdREMClassifier,
    CORALClassifier,
    GTDAClassifier,
    JDAClassifier,
    PrDAClassifier,
    RWAClassifier,
)
from certvol.sklearn._trained import BasicClassifier, CVPClassifier

EXPECTED_FAILED_CHECKS = {
    "check_classifiers_classes": "it fits the labels -1 and 1, but -1 marks unlabelled rows here; "
    "scikit-learn exempts its own semi-supervised estimators, by their names",
}

__all__ = [
    "EXPECTED_FAILED_CHECKS",
    "AdREMClassifier",
    "BasicClassifier",
    "CORALClassifier",
    "CVPClassifier",
    "GTDAClassifier",
    "JDAClassifier",
    "PrDAClassifier",
    "RWAClassifier",
]
