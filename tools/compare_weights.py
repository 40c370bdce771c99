"""Compare what two source trees learn: train on digits with each and compare weights bit for bit.

    python tools/compare_weights.py /path/to/old/src src
    python tools/compare_weights.py src --save old.json    # keep the digests of one tree
    python tools/compare_weights.py old.json src           # compare with them later

Only public commands and the scikit-learn estimator are used, so the trees may differ in everything
else. Each tree runs in its own processes with one thread. The exit code is 1 if any tensor differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

METHODS = ("cvp", "basic", "can", "dann", "rsda_mstn", "coral")
SETTINGS = {
    "augment.flip": "false",
    "data.image_size": 16,
    "training.pretrain_steps": 150,
    "training.pseudo_labels": "argmax",
    "training.cycles": 6,
    "training.cycle_steps": 10,
}
ESTIMATOR = """
import numpy as np, sys
from safetensors.numpy import save_file
from sklearn.datasets import make_blobs
from certvol.sklearn import CVPClassifier
X, y = make_blobs(600, 16, centers=5, cluster_std=4.0, random_state=0)
X[300:] += 2.0
y[300:] = -1
model = CVPClassifier(pretrain_steps=100, cycles=5, cycle_steps=10, random_state=0)
if "pseudo_labels" in model.get_params():  # trees without it label by the classifier
    model.set_params(pseudo_labels="argmax")
probabilities = model.fit(X.astype(np.float32), y).predict_proba(X.astype(np.float32))
save_file({"probabilities": np.ascontiguousarray(probabilities)}, sys.argv[1])
"""


def certvol(tree: Path, *words: str) -> None:
    python(tree, "-m", "certvol", *words)


def python(tree: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, stdout=subprocess.DEVNULL)


def digests(file: Path) -> dict[str, str]:
    """Return a digest of each tensor of a weights file."""
    return {
        name: hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
        for name, tensor in load_file(file).items()
    }


def train(tree: Path, work: Path, data: Path, methods: list[str]) -> dict[str, dict[str, str]]:
    """Train every method with the code in `tree`; return the digests of its delivered weights."""
    found = {}
    places = ["--source", str(data / "source"), "--target", str(data / "target")]
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    for method in methods:
        out = work / method
        words = ["--out", str(out), "--preset", "quick", "--method", method, *settings]
        certvol(tree, "adapt", *places, *words)
        found[method] = digests(out / "model.safetensors")
        print(f"{tree}: {method} trained", flush=True)
    probabilities = work / "estimator.safetensors"
    python(tree, "-c", ESTIMATOR, str(probabilities))
    return {**found, "CVPClassifier": digests(probabilities)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the `src` folder of one commit, or saved digests")
    parser.add_argument("new", nargs="?", type=Path, help="the `src` folder of another commit")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="NAME,NAME")
    parser.add_argument("--save", type=Path, help="write the digests of the old tree to this file")
    options = parser.parse_args()
    methods, saved = options.methods.split(","), options.old.suffix == ".json"
    if options.new is None and (saved or options.save is None):
        parser.error("give a second tree, or --save FILE")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        tree = options.new or options.old
        certvol(tree, "demo", "--out", str(work / "digits"), "--methods", "source_only")
        data = work / "digits" / "data"
        if saved:
            old = json.loads(options.old.read_text())
        else:
            old = train(options.old, work / "old", data, methods)
        if options.save:
            options.save.write_text(json.dumps(old, indent=2))
        if options.new is None:
            return 0
        new = train(options.new, work / "new", data, methods)
    different = [name for name in new if sorted(old[name].values()) != sorted(new[name].values())]
    for name in new:
        changed = [key for key, digest in old[name].items() if digest != new[name].get(key)]
        print(f"{name}: {'different: ' + ', '.join(changed[:5]) if name in different else 'equal'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
