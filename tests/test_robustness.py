"""The robustness benchmark chooses the rows it says, resumes, and prints what its lines hold."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def data() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("robustness_data")


@pytest.fixture(scope="module")
def bench(data: ModuleType) -> ModuleType:
    return importlib.import_module("robustness")


def labels(*counts: int) -> np.ndarray:
    return np.repeat([f"class-{i:02d}" for i in range(len(counts))], counts)


def counts_of(names: np.ndarray) -> list[int]:
    return list(map(int, np.unique(names, return_counts=True)[1]))


SOURCE = labels(*[20] * 10)
TARGET = labels(*range(100, 200, 10))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_full_target_keeps_everything(data: ModuleType) -> None:
    part = data.full(SOURCE, TARGET, rng())
    assert part.source.tolist() == list(range(200))
    assert part.target.tolist() == part.scored.tolist() == list(range(len(TARGET)))


def test_a_partial_target_has_the_first_third_of_the_classes(data: ModuleType) -> None:
    part = data.partial(SOURCE, TARGET, rng())
    assert counts_of(TARGET[part.target]) == [100, 110, 120]
    assert len(part.source) == 200
    names = labels(*[4] * 31)
    assert len(set(names[data.partial(names, names, rng()).target])) == 10


def test_one_class_is_whole_and_another_one_for_other_seeds(data: ModuleType) -> None:
    found = set()
    for seed in range(20):
        names = TARGET[data.one_class(SOURCE, TARGET, rng(seed)).target]
        assert len(set(names)) == 1
        assert len(names) == (names[0] == TARGET).sum()
        found.add(names[0])
    assert len(found) > 5


def test_a_long_tail_falls_to_a_hundredth_and_keeps_every_class(data: ModuleType) -> None:
    even = labels(*[1000] * 10)
    counts = counts_of(even[data.long_tailed(SOURCE, even, rng()).target])
    assert (counts[0], counts[-1]) == (1000, 10)
    ratios = np.array(counts[:-1]) / counts[1:]
    np.testing.assert_allclose(ratios, 100 ** (1 / 9), rtol=0.05)
    few = labels(*[8] * 10)
    assert counts_of(few[data.long_tailed(SOURCE, few, rng()).target])[-1] == 1


def test_unknown_classes_are_a_known_share_and_not_scored(data: ModuleType) -> None:
    part = data.unknown(SOURCE, TARGET, rng())
    known = set(SOURCE[part.source])
    assert len(known) == 7
    is_known = np.isin(TARGET[part.target], list(known))
    assert is_known.mean() == pytest.approx(0.7, abs=0.01)
    assert part.target[is_known].tolist() == part.scored.tolist()
    assert len(part.scored) == np.isin(TARGET, list(known)).sum()


def test_few_images_a_class(data: ModuleType) -> None:
    part = data.few_source(SOURCE, TARGET, rng())
    assert counts_of(SOURCE[part.source]) == [5] * 10
    assert len(part.target) == len(TARGET)
    assert counts_of(TARGET[data.few_target(SOURCE, TARGET, rng()).target]) == [3] * 10


def test_a_part_depends_on_the_seed_alone(data: ModuleType, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", features=np.zeros((200, 2)), labels=SOURCE)
    domain = data.Domain(tmp_path / "a.npz")
    task = data.Task("office-31-x", "A-A", domain, domain)
    first, second, other = (task.part("few-source", seed).source for seed in (0, 0, 1))
    assert first.tolist() == second.tolist() != other.tolist()


def test_parts_of_files_and_folders_hold_the_chosen_rows(data: ModuleType, tmp_path: Path) -> None:
    features = np.arange(12.0).reshape(6, 2)
    names = labels(3, 3)
    np.savez(tmp_path / "a.npz", features=features, labels=names, about=np.array("x"))
    place = data.Domain(tmp_path / "a.npz").write(np.array([1, 4]), tmp_path / "part")
    with np.load(place) as file:
        assert file["features"].tolist() == features[[1, 4]].tolist()
        assert file["labels"].tolist() == ["class-00", "class-01"]
        assert str(file["about"]) == "x"
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(name.encode())
    domain = data.Domain(tmp_path / "images")
    assert domain.labels().tolist() == ["cat", "cat", "dog"]
    folder = domain.write(np.array([1, 2]), tmp_path / "links")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.png")} == {
        "cat/2.png",
        "dog/1.png",
    }
    assert (folder / "dog" / "1.png").read_bytes() == b"dog/1.png"


def test_tasks_are_those_whose_files_are_there(data: ModuleType, tmp_path: Path) -> None:
    for name in ("rn_amazon", "rn_webcam", "rn_caltech", "inc_oc_dslr", "inc_caltech"):
        (tmp_path / f"{name}.npz").touch()
    found = {(task.data, task.name) for task in data.feature_tasks(tmp_path)}
    assert found == {
        ("office-31-rn", "A-W"),
        ("office-31-rn", "W-A"),
        ("office-caltech-inc", "C-D"),
        ("office-caltech-inc", "D-C"),
    }


def test_variants_are_read_and_others_refused(bench: ModuleType) -> None:
    assert bench.parse_variant("a=training.cycles=6,model.adapter=null") == (
        "a",
        {"training.cycles": 6, "model.adapter": None},
    )
    for wrong in ("a=cycles=6", "=training.cycles=6", "a=training.cycles"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench.parse_variant(wrong)


def line(key: str, before: float, after: float, **changed: object) -> dict[str, object]:
    given = {"source_only": before, "adapted": after, "delivered": "last", "cpu_seconds": 4.0}
    return {"key": key, "settings": {}, **given, **changed}


def test_lines_survive_a_kill_and_the_newest_counts(bench: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "results.jsonl"
    bench.append_line(place, line("d/A-B/full/x/0", 0.5, 0.6))
    with place.open("a") as file:
        file.write('{"key": "d/A-B/full/x/1", "sou')
    bench.append_line(place, line("d/A-B/full/x/0", 0.5, 0.7))
    assert {key: found["adapted"] for key, found in bench.read_lines(place).items()} == {
        "d/A-B/full/x/0": 0.7
    }


def test_the_table_averages_seeds_before_it_names_the_worst_task(bench: ModuleType) -> None:
    lines = [
        line("d/A-B/full/x/0", 0.5, 0.6),
        line("d/A-B/full/x/1", 0.5, 0.4, delivered="pretrained"),
        line("d/B-A/full/x/0", 0.6, 0.58),
        line("d/B-A/full/x/1", 0.6, 0.58, cpu_seconds=8.0),
    ]
    text = bench.table(lines)
    assert "| full | x | 4 | 55.0 | 54.0 | -1.0 | B-A -2.0 | 25 % | 5 |" in text


def test_the_right_prior_holds_the_true_shares(bench: ModuleType, tmp_path: Path) -> None:
    from certvol.data.target_prior import read_prior
    from certvol.settings import DataConfig

    bench.write_shares(labels(3, 1), tmp_path / "shares.csv")
    config = DataConfig(target_prior=str(tmp_path / "shares.csv"))
    classes = ["class-00", "class-01", "class-02"]
    prior = read_prior(config, classes, np.arange(3))
    assert prior.shares_C is not None
    assert prior.shares_C.tolist() == [0.75, 0.25, 0.0]


def test_cells_are_filtered_by_patterns(bench: ModuleType, data: ModuleType) -> None:
    domain = data.Domain(Path("x.npz"))
    tasks = [data.Task("d", name, domain, domain) for name in ("A-B", "B-A")]
    cells = bench.plan(tasks, {"p": {}, "q": {}}, [0, 1], ["d/A-B/full/*/1", "*/partial/q/0"])
    assert {cell.key for cell in cells} == {
        "d/A-B/full/p/1",
        "d/A-B/full/q/1",
        "d/A-B/partial/q/0",
        "d/B-A/partial/q/0",
    }


@pytest.mark.slow
def test_a_digits_task_runs_once_and_is_printed_again(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = "training.pretrain_steps=10,training.cycles=1,training.cycle_steps=2"
    words = ["--out", str(tmp_path), "--variant", f"short={short}"]
    words += ["--only", "digits/B-T/unknown/short/0,digits/B-T/few-target/short/0"]
    assert bench.main(words) == 0
    first = capsys.readouterr()
    assert "2/2" in first.err
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {each["key"].split("/")[2] for each in lines} == {"unknown", "few-target"}
    assert bench.main(words) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert again.out == first.out
