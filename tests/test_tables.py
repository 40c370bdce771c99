import csv
import io

import numpy as np

from certvol.inference import Outputs
from certvol.tables import predictions_csv

PATHS = ["=cmd.png", "+1.png", "-2.png", "@x.png", "\tt.png", "a,b.png", 'q".png', "new\nline.png", "plain.png"]


def test_no_cell_is_a_formula_and_paths_still_lead_to_their_files() -> None:
    outputs = Outputs(np.tile(np.float32([[0.2, 0.8]]), (len(PATHS), 1)), np.float32(range(len(PATHS))))
    text = predictions_csv(PATHS, ["a", "=SUM(1)"], outputs)
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())
        assert row["label"] == "'=SUM(1)"
    assert sorted(row["path"].removeprefix("./") for row in rows) == sorted(PATHS)
    assert {row["path"] for row in rows if row["path"].startswith("./")} == {f"./{p}" for p in PATHS[:5]}


def test_figures_come_back_as_the_floats_they_were() -> None:
    sigma = np.random.default_rng(0).random(50).astype(np.float32)
    text = predictions_csv([str(i) for i in range(50)], ["a"], Outputs(np.ones((50, 1), np.float32), sigma))
    read = {row["path"]: np.float32(row["sigma"]) for row in csv.DictReader(io.StringIO(text))}
    assert all(read[str(i)] == sigma[i] for i in range(50))


def test_a_method_without_sigma_leaves_the_column_empty() -> None:
    text = predictions_csv(["x"], ["a"], Outputs(np.ones((1, 1), np.float32), None))
    assert text.splitlines() == ["path,label,probability,sigma", "x,a,1,"]
