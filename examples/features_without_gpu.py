# %% [markdown]
# # Adapting feature vectors without a GPU
#
# One measuring device has labels, another has none. The rows of both come from scikit-learn's
# handwritten digits (64 numbers each); the second device is simulated. Run this as a script, or
# cell by cell in an editor that knows `# %%`.

# %%
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import SelfTrainingClassifier

from certvol.sklearn import BasicClassifier, CORALClassifier, CVPClassifier, JDAClassifier

# %% [markdown]
# The shift: the second device blurs along the rows, each of its 64 sensors has its own gain and
# offset, and it adds noise.

# %%
rng = np.random.default_rng(0)
images, labels = load_digits(return_X_y=True)
order = rng.permutation(len(images))
source, target = order[:900], order[900:]
grid = images.reshape(-1, 8, 8)
blurred = (0.5 * grid + 0.25 * np.roll(grid, 1, axis=2) + 0.25 * np.roll(grid, -1, axis=2)).reshape(
    -1, 64
)
X_source, y_source = images[source], labels[source]
gain, offset = rng.uniform(0.5, 1.5, 64), rng.normal(0, 2, 64)
X_target = gain * blurred[target] + offset + rng.normal(0, 2, (len(target), 64))
y_target = labels[target]  # only to print how well it went

# %% [markdown]
# scikit-learn's convention for rows without a label is -1: one matrix holds both domains.

# %%
X = np.concatenate([X_source, X_target])
y = np.concatenate([y_source, np.full(len(X_target), -1)])

models = {
    "logistic regression, source alone": make_pipeline(
        StandardScaler(), LogisticRegression(max_iter=500)
    ),
    "SelfTrainingClassifier": make_pipeline(
        StandardScaler(), SelfTrainingClassifier(LogisticRegression(max_iter=500))
    ),
    "CORALClassifier": CORALClassifier(),
    "JDAClassifier": JDAClassifier(n_components=30),
    "BasicClassifier": BasicClassifier(standardize="domain", random_state=0),
    "CVPClassifier": CVPClassifier(standardize="domain", random_state=0),
}
accuracy = {}
for name, model in models.items():
    started = time.perf_counter()
    if "alone" in name:
        model.fit(X_source, y_source)
    else:
        model.fit(X, y)
    accuracy[name] = model.score(X_target, y_target)
    print(f"{name:35} {100 * accuracy[name]:5.1f} %   {time.perf_counter() - started:5.1f} s")

# %% [markdown]
# `certainty` is sigma, the width of the Gaussian around each row: the wider, the more certain. Keep
# the more certain half, and look at the rest yourself.

# %%
cvp = models["CVPClassifier"]
sigma = cvp.certainty(X_target)
right = cvp.predict(X_target) == y_target
sure = sigma >= np.median(sigma)
print(
    f"accuracy of the surer half {100 * right[sure].mean():.1f} %, "
    f"of the other {100 * right[~sure].mean():.1f} %"
)
