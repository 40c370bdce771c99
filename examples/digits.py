# %% [markdown]
# # Digits from start to end
#
# Labelled digits drawn from fonts, handwritten digits without labels: adapt, predict, and see what
# sigma is worth. It takes twenty seconds of a CPU core and downloads nothing. Replace the two
# folders by yours.

# %%
import csv
import tempfile
from pathlib import Path

import certvol
from certvol.data.digits import write_digits

place = Path(tempfile.mkdtemp())
source, target = write_digits(place, seed=0, per_class=100)
for folder in (source, target):
    print(f"{folder.name}: {len(list(folder.rglob('*.png'))):,} images")

# %% [markdown]
# `adapt` trains on the source, then adapts to the target. The preset `quick` is for small images on
# a CPU; for photographs leave it out. Sections of settings are dictionaries.

# %%
run = certvol.adapt(
    source,
    target,
    out=place / "run",
    preset="quick",
    data={"image_size": 16, "cache_dir": str(place / "cache")},
    augment={"flip": False},  # a mirrored digit is another digit, or none
    training={"pretrain_steps": 200, "cycles": 15},
    model={"norm": "mixed"},
)
print(f"the model of {run.delivery.why}")

# %% [markdown]
# The target's folders happen to be named like the classes, so accuracy was measured after training.
# Training did not see those names.

# %%
assert run.metrics is not None
before, after = (run.metrics[key]["accuracy"] for key in ("source_only", "adapted"))
print(f"target accuracy: {100 * before:.1f} % before adaptation, {100 * after:.1f} % after")

# %% [markdown]
# Predict new images by their paths. Sigma is the certainty: wide means sure.

# %%
model = certvol.load(run.path)
paths = sorted(target.rglob("*.png"))[::180]
found = model.predict(paths)
for path, label, sigma in zip(paths, found.labels, found.sigma, strict=True):
    print(f"{path.parent.name}/{path.name}: predicted {label}, sigma {sigma:.2f}")

# %% [markdown]
# How much better are the images that the model is sure of? Every target image is in
# `predictions.csv`, the most certain half against the other half:

# %%
with (run.path / "predictions.csv").open(newline="") as file:
    rows = sorted(csv.DictReader(file), key=lambda row: -float(row["sigma"]))
right = [Path(row["path"]).parent.name == row["label"] for row in rows]
half = len(right) // 2
sure, unsure = sum(right[:half]) / half, sum(right[half:]) / (len(right) - half)
print(f"right in the surer half: {100 * sure:.1f} %, in the other: {100 * unsure:.1f} %")

# %% [markdown]
# `certvol report RUN` writes a page with every image and a threshold to try out. The same from the
# command line: [Ten minutes with your own folders](../docs/get-started.md).
