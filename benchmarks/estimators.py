"""Compare estimators of certvol and scikit-learn on the same features: accuracy and time.

    for DOMAIN in webcam amazon; do
        certvol extract $DATA/office-31/$DOMAIN --backbone inception_v3 --weights W.safetensors \
            --data.image_size 224 --out $DOMAIN.npz
    done
    python benchmarks/estimators.py --source webcam.npz --target amazon.npz --seeds 0,1,2
    python benchmarks/estimators.py --size 10000    # random features: time and memory only

The target's labels are used only to print accuracies.
"""

import argparse
import resource
import time
import warnings
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from certvol.sklearn import (
    AdREMClassifier,
    BasicClassifier,
    CORALClassifier,
    CVPClassifier,
    GTDAClassifier,
    JDAClassifier,
    PrDAClassifier,
    RWAClassifier,
)

LOGISTIC = LogisticRegression(max_iter=1000)
SOURCE_ALONE = "source alone"
# Name -> estimator with default settings.
MODELS: dict[str, Any] = {
    f"logistic regression, {SOURCE_ALONE}": make_pipeline(StandardScaler(), LOGISTIC),
    "SelfTrainingClassifier": make_pipeline(StandardScaler(), SelfTrainingClassifier(LOGISTIC)),
    "LabelSpreading, 7 neighbours": make_pipeline(
        StandardScaler(), LabelSpreading(kernel="knn", n_neighbors=7)
    ),
    "CORALClassifier": CORALClassifier(),
    "JDAClassifier": JDAClassifier(),
    "GTDAClassifier": GTDAClassifier(),
    "RWAClassifier": RWAClassifier(),
    "AdREMClassifier": AdREMClassifier(),
    "PrDAClassifier": PrDAClassifier(),
    "BasicClassifier": BasicClassifier(),
    "BasicClassifier, domain": BasicClassifier(standardize="domain"),
    "CVPClassifier": CVPClassifier(),
    "CVPClassifier, domain": CVPClassifier(standardize="domain"),
    f"CVPClassifier, {SOURCE_ALONE}": CVPClassifier(cycles=0),
}
DRAWN = (RWAClassifier, AdREMClassifier, PrDAClassifier, BasicClassifier, CVPClassifier)
"""The estimators that the seed matters to."""


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        features = file["features"]
        return (features if features.ndim == 2 else features[:, 0]), file["labels"]


def made_up(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features and labels of a source and of a target, with half of the rows each."""
    rng, dim, classes, half = np.random.default_rng(0), 2048, 31, rows // 2
    labels = rng.integers(classes, size=rows)
    means = 0.15 * rng.normal(size=(classes, dim))[labels]
    features = (means + rng.normal(size=(rows, dim))).astype(np.float32)
    target = features[half:] + 0.3 * rng.normal(size=dim).astype(np.float32)
    return features[:half], labels[:half], target, labels[half:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="a .npz file with labels")
    parser.add_argument("--target", help="a .npz file with labels, to print accuracies")
    parser.add_argument("--size", type=int, help="instead of files: this many made-up rows")
    parser.add_argument("--seeds", default="0")
    parser.add_argument(
        "--models",
        default="",
        help="only those whose name holds one of these words, separated by commas",
    )
    options = parser.parse_args()
    if options.size:
        source, labels, target, true = made_up(options.size)
    else:
        (source, labels), (target, true) = read(options.source), read(options.target)
    names, numbers = np.unique(np.concatenate([labels, true]), return_inverse=True)
    rows = np.concatenate([source, target])
    marked = np.concatenate([numbers[: len(labels)], np.full(len(target), -1)])
    print(
        f"{len(source)} source rows, {len(target)} target rows, {source.shape[1]} features, "
        f"{len(names)} classes"
    )
    for name, unfitted in MODELS.items():
        if not any(word in name for word in options.models.split(",")):
            continue
        drawn = isinstance(unfitted, DRAWN)
        given = (source, numbers[: len(labels)]) if SOURCE_ALONE in name else (rows, marked)
        for seed in [int(word) for word in options.seeds.split(",")] if drawn else [0]:
            model = clone(unfitted)
            if drawn:
                model.set_params(random_state=seed)
            wall, cpu = time.perf_counter(), time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = model.fit(*given)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            right = 100 * float((fitted.predict(target) == numbers[len(labels) :]).mean())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{name:35} seed {seed}: {right:5.1f} %, fit {wall:6.1f} s "
                f"({cpu:6.1f} s of CPU), peak {peak:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
