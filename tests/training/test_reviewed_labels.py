"""Runs that continue from another with reviewed labels: what trains, what never does, resuming."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.data.batches import CyclePlan
from certvol.data.reviewed import reviewed_labels
from certvol.data.store import Store
from certvol.data.views import ImageViews
from certvol.distributed import Team
from certvol.errors import Interrupted, UserError
from certvol.methods._base import ReviewedRows
from certvol.methods._losses import cross_entropy
from certvol.nn.norm import TARGET
from certvol.review.estimates import estimate
from certvol.review.target import open_target
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import trained_on
from certvol.runs.review_labels import COLUMNS, Review, review_cells
from certvol.runs.tables import csv_text
from certvol.settings import AugmentConfig, TrainingConfig
from certvol.training.planner import Planner
from certvol.training.step import REVIEWED, Stepper, _Losses
from support.images import HUES, tiny, tiny_head
from support.methods import METHODS, make_batch, make_method
from support.reporter import RecordingReporter
from support.stop_at import StopAt

ANSWERS = [
    Review("apple/0.png", "apple"),
    Review("apple/1.png", "apple", "random"),
    Review("leaf/2.png", "leaf"),
    Review("leaf/3.png", "sky"),  # people err
    Review("sky/4.png", None, "chosen", "none"),
    Review("sky/5.png", None, "random", "none"),
    Review("sky/6.png", None, "chosen", "unsure"),
]


def write_answers(path: Path, answers: Iterable[Review] = ANSWERS) -> Path:
    path.write_text(csv_text(COLUMNS, [review_cells(each) for each in answers]))
    return path


def tensors(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / f"{name}.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def first(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = certvol.adapt(*folders, out=tmp_path_factory.mktemp("first") / "run", **tiny())
    write_answers(run.path / "review.csv")
    return run.path


def go_on(first: Path, out: Path, labels: Path | None = None, **changed: Any) -> certvol.Run:
    return certvol.adapt(
        out=out, from_run=first, target_labels=labels or first / "review.csv", **changed
    )


def test_correct_replaces_labels_of_reviewed_images_only() -> None:
    reviewed = reviewed_labels(np.array([-1, 2, -1, 0, -1]), np.array([4]))
    assert reviewed is not None
    images_N, labels_N = np.array([4, 3, 2, 1, 0, 3]), np.array([1, 1, 1, 1, 1, -1])
    assert reviewed.correct(images_N, labels_N).tolist() == [-1, 0, 1, 2, 1, 0]
    assert labels_N.tolist() == [1, 1, 1, 1, 1, -1]
    assert reviewed_labels(np.array([-1, -1]), np.array([1])) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "train"),
    [*((norm, "all") for norm in ("mixed", "per_domain", "dsbn", "frozen")), ("auto", "head")],
)
def test_a_run_starts_where_the_other_ended(
    norm: str, train: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its model before adaptation is the other's: the same weights, and the same predictions."""
    settings = tiny(model__norm=norm, model__train=train, training__teacher=0.5)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    labels = write_answers(tmp_path / "labels.csv")
    second = go_on(run.path, tmp_path / "second", labels)
    start, end = tensors(second.path, "pretrained"), tensors(run.path)
    assert all(torch.equal(start[key], end[key]) for key in start)
    assert run.metrics is not None
    assert second.metrics is not None
    assert second.metrics["source_only"] == run.metrics["adapted"]
    assert second.metrics["start"] == str(run.path)
    assert second.delivery.mode == run.delivery.mode
    evaluated = certvol.evaluate(second.path, folders[1])
    assert evaluated["source_only"]["accuracy"] == run.metrics["adapted"]["accuracy"]


def test_a_projection_of_features_is_taken_over(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny_head(model__feature_dims=6))
    labels = write_answers(tmp_path / "labels.csv")
    second = go_on(run.path, tmp_path / "second", labels)
    key = "network.projection.basis_DR"
    assert torch.equal(tensors(run.path)[key], tensors(second.path)[key])


def test_random_and_unsure_answers_do_not_train(first: Path, tmp_path: Path) -> None:
    expected = tensors(go_on(first, tmp_path / "expected").path)
    changed = [
        Review(each.path, "leaf", "random")
        if each.kind == "random"
        else Review(each.path, None, "random", "none")
        if each.answer == "unsure"
        else each
        for each in ANSWERS
    ]
    labels = write_answers(tmp_path / "changed.csv", changed)
    assert same(tensors(go_on(first, tmp_path / "same", labels).path), expected)
    some = write_answers(tmp_path / "some.csv", [each for each in ANSWERS if each.answer != "none"])
    assert not same(tensors(go_on(first, tmp_path / "some", some).path), expected)
    everything = go_on(first, tmp_path / "all", data={"label_kinds": "all"}).path
    assert not same(tensors(everything), expected)
    kept = (everything / "labels.csv").read_text()
    assert "random" not in kept
    assert kept.count("chosen") == len(ANSWERS)


@pytest.mark.parametrize(
    ("method", "rule"), [("cvp", "argmax"), ("cvp", "cluster"), ("dann", "argmax"), ("can", "lame")]
)
def test_plans_hold_reviewed_labels_and_no_image_of_another_class(
    method: str,
    rule: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[CyclePlan] = []
    for name in ("adaptation", "labelled_adaptation"):
        plan_cycle = getattr(Planner, name)

        def watched(*arguments: Any, plan_cycle: Any = plan_cycle) -> Any:
            found = plan_cycle(*arguments)
            plans.append(found[0])
            return found

        monkeypatch.setattr(Planner, name, watched)
    settings = tiny(method__name=method, training__pseudo_labels=rule, training__cycle_steps=9)
    labels = write_answers(tmp_path / "labels.csv")
    run = certvol.adapt(*folders, out=tmp_path / "run", target_labels=labels, **settings)
    assert len(plans) == 3
    paths = sorted(certvol.load(run.path).classes)
    assert paths == sorted(HUES)
    order = _order_of_training(folders[1])
    known = {order.index(each.path): each for each in ANSWERS if each.kind == "chosen"}
    seen = set()
    for plan in plans:
        for images, names, source in zip(
            plan.images_SN, plan.labels_SN, plan.num_source_S, strict=True
        ):
            for image, label in zip(images[source:], names[source:], strict=True):
                if int(image) in known:
                    review = known[int(image)]
                    assert review.answer != "none"
                    if review.label is not None:
                        assert paths[label] == review.label
                        seen.add(review.path)
    assert seen


def _order_of_training(target: Path) -> list[str]:
    from certvol.data.domains import open_target
    from certvol.settings import DataConfig

    return open_target(target, 8, DataConfig()).paths


def test_a_step_weighs_reviewed_rows_as_other_rows() -> None:
    """A step's loss against plain PyTorch; statistics are those of the batch alone."""
    rng = np.random.default_rng(0)
    pixels, rows = rng.integers(0, 256, (20, 20, 20, 3), dtype=np.uint8), np.arange(20)
    method = make_method("basic").train()
    method.network.classifier.dropout = 0.0
    store = Store(pixels, rows, torch.device("cpu"), 0.5)
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    known_N = np.full(20, -1)
    known_N[[3, 8, 11]] = [2, 0, 1]
    reviewed = reviewed_labels(known_N, np.array([], np.int64))
    images = rng.integers(0, 20, (1, 18))
    plan = CyclePlan(images, images % 4, np.array([9]))
    settings = TrainingConfig(reviewed_share=0.25)
    stepper = Stepper(method, views, settings, Team(), False, reviewed)
    before = {name: value.clone() for name, value in method.named_buffers()}
    terms, batch = stepper.step(plan, 0, 5, 0.0, True, 0.0)
    assert batch.reviewed is not None
    assert len(batch.reviewed.labels_R) == 6  # a quarter of 24
    assert sorted(batch.reviewed.labels_R.tolist()) == [0, 0, 1, 1, 2, 2]
    after = {name: value.clone() for name, value in method.named_buffers()}
    with torch.no_grad():
        for name, value in method.named_buffers():
            value.copy_(before[name])
        with method.network.rows_of(num_source=9):
            ce = cross_entropy(method.logits(method.network.features(batch.inputs)), batch.labels_N)
        assert all(torch.equal(after[name], value) for name, value in method.named_buffers())
        with method.eval().network.rows_of(domain=TARGET):
            logits_RC = method.logits(method.network.features(batch.reviewed.inputs))
    assert float(terms["ce"]) == pytest.approx(float(ce.mean()), rel=1e-4)
    reviewed_ce = cross_entropy(logits_RC, batch.reviewed.labels_R).mean()
    assert float(terms[REVIEWED]) == pytest.approx(float(reviewed_ce) * 6 / 18, rel=0.02)
    again = Stepper(method, views, settings, Team(), False, reviewed)._batch(plan, 0, 5, True)
    assert again.reviewed is not None
    assert torch.equal(again.reviewed.inputs, batch.reviewed.inputs)
    assert (
        Stepper(method, views, settings, Team(), False, reviewed)._batch(plan, 0, 5, False).reviewed
        is None
    )


TRAINED = [name for name, each in METHODS.items() if each.adapts and not each.closed_form]


@pytest.mark.parametrize("name", TRAINED)
def test_reviewed_rows_train_the_classifier_of_every_method(name: str) -> None:
    method, rows = make_method(name).train(), make_batch(n=8)
    reviewed = ReviewedRows(rows.inputs, rows.labels_N, 0.5)
    statistics = {key: value.clone() for key, value in method.named_buffers()}
    terms = _Losses(method)._on(reviewed)
    terms.backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in method.parameters())
    assert all(torch.equal(value, statistics[key]) for key, value in method.named_buffers())


def test_reviewed_labels_join_the_source_of_a_method_in_closed_form(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    found = []
    for name in ("apple", "leaf"):
        answers = [Review(f"apple/{i}.png", name) for i in range(8)]
        labels = write_answers(tmp_path / f"{name}.csv", answers)
        settings = tiny_head(method__name="coral")
        run = certvol.adapt(*folders, out=tmp_path / name, target_labels=labels, **settings)
        found.append(certvol.load(run.path).predict(folders[1] / "apple" / "9.png").labels)
    assert found == [["apple"], ["leaf"]]


def test_a_method_that_does_not_adapt_refuses_labels(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    labels = write_answers(tmp_path / "labels.csv")
    settings = tiny(method__name="source_only")
    with pytest.raises(UserError, match="no use for reviewed labels"):
        certvol.adapt(*folders, out=tmp_path / "run", target_labels=labels, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("keeps_the_first", [True, False])
def test_a_stopped_run_resumes_exactly(
    step: int, keeps_the_first: bool, first: Path, tmp_path: Path
) -> None:
    """Neither the other run nor its labels are needed any more, and new answers change nothing."""
    expected = go_on(first, tmp_path / "expected").path
    copy = tmp_path / "first"
    shutil.copytree(first, copy)
    with pytest.raises(Interrupted):
        go_on(copy, tmp_path / "run", stop_signal=StopAt(step))
    if keeps_the_first:
        write_answers(copy / "review.csv", [*ANSWERS, Review("sky/7.png", "apple")])
    else:
        shutil.rmtree(copy)
    run = certvol.adapt(resume=tmp_path / "run").path
    for name in ("model", "pretrained"):
        assert (run / f"{name}.safetensors").read_bytes() == (
            expected / f"{name}.safetensors"
        ).read_bytes()
    for name in ("history.jsonl", "predictions.csv", "labels.csv", "review.csv"):
        assert (run / name).read_bytes() == (expected / name).read_bytes()


def test_labels_that_change_in_a_stopped_run_are_refused(first: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        go_on(first, tmp_path / "run", stop_signal=StopAt(4))
    write_answers(tmp_path / "run" / "labels.csv", ANSWERS[:3])
    with pytest.raises(UserError, match="the labels changed since the run"):
        certvol.adapt(resume=tmp_path / "run")


def test_its_settings_repeat_a_run_that_continues(first: Path, tmp_path: Path) -> None:
    expected = go_on(first, tmp_path / "one").path
    repeated = certvol.adapt(out=tmp_path / "two", config=expected / "config.yaml").path
    assert same(tensors(repeated), tensors(expected))


@pytest.mark.slow
def test_labels_teach_what_adaptation_alone_cannot(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A third of the labels, with two classes swapped, turn the model's answers round."""
    settings = tiny(training__cycles=8, training__cycle_steps=20, training__pretrain_steps=100)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    swapped = {"apple": "leaf", "leaf": "apple", "sky": "sky"}
    answers = [Review(f"{name}/{i}.png", swapped[name]) for name in HUES for i in range(4)]
    labels = write_answers(tmp_path / "labels.csv", answers)
    changed = {"training": {"reviewed_share": 0.9}, "guard": {"action": "warn"}}
    second = go_on(run.path, tmp_path / "second", labels, **changed).path
    model = certvol.load(second)
    given = [folders[1] / each.path for each in answers]
    right = [
        label == each.label
        for label, each in zip(model.predict(given).labels, answers, strict=True)
    ]
    assert np.mean(right) >= 0.9


def test_labels_that_trained_an_earlier_run_judge_none_that_continues_from_it(
    first: Path, tmp_path: Path
) -> None:
    second = go_on(first, tmp_path / "second", data={"label_kinds": "all"}).path
    given = {each.path for each in ANSWERS if each.answer != "unsure"}
    assert trained_on(RunFolder(second)) == given
    random = [Review(each.path, each.label, "random") for each in ANSWERS if each.label]
    random.append(Review("apple/7.png", "leaf", "random"))
    labels = write_answers(tmp_path / "labels.csv", random)
    none = certvol.adapt(out=tmp_path / "third", from_run=second).path
    third = go_on(second, tmp_path / "other", labels, training={"cycles": 0})
    shutil.rmtree(second)
    for path in (none, third.path):
        assert trained_on(RunFolder(path)) == given
        target = open_target(path)
        assert given.isdisjoint(target.paths[item.row] for item in target.queue(100))
        assert estimate(target, random, 0.5).random == 1
    assert third.verdict is not None
    assert third.verdict["accuracy"]["labels"] == 1


def test_without_cycles_random_labels_calibrate_only(first: Path, tmp_path: Path) -> None:
    labels = write_answers(tmp_path / "labels.csv", ANSWERS[1:2])
    run = go_on(first, tmp_path / "run", labels, training={"cycles": 0})
    assert run.delivery.model == "pretrained"
    assert all(torch.equal(tensors(run.path)[key], value) for key, value in tensors(first).items())


def test_answers_about_images_that_are_gone_are_left_out(first: Path, tmp_path: Path) -> None:
    reporter = RecordingReporter()
    labels = write_answers(tmp_path / "labels.csv", [*ANSWERS, Review("sky/99.png", "sky")])
    run = go_on(first, tmp_path / "run", labels, reporter=reporter)
    assert any("1 of the 8 images" in text and "sky/99.png" in text for text in reporter.warned)
    assert "99" not in (run.path / "labels.csv").read_text()


@pytest.mark.parametrize(
    ("answers", "settings", "message"),
    [
        ([Review("sky/99.png", "sky")], {}, "give the labels of this target"),
        ([Review("sky/1.png", "cow")], {}, "not a class of the run"),
        ([Review("sky/1.png", None, "chosen", "none")], {}, "holds no label to train on"),
        ([Review("sky/1.png", "sky", "random")], {}, "all labels .* are of random images"),
        (ANSWERS, {"training": {"pretrain_steps": 5}}, "keeps `training.pretrain_steps` 0; leave"),
        (ANSWERS, {"training": {"seed": 5}}, "keeps `training.seed` 0; leave"),
        (ANSWERS, {"method": "basic"}, "keeps `method.name` cvp; leave"),
        (ANSWERS, {"model": {"norm": "mixed"}}, "keeps `model.norm` per_domain; leave"),
        (ANSWERS, {"data": {"target_classes": "leaf,sky"}}, "`apple`, which the target prior rul"),
        (ANSWERS, {"preset": "paper"}, "not --preset or --config"),
        (ANSWERS, {"training": {"reviewed_share": 0}}, "`training.reviewed_share` should be above"),
    ],
)
def test_mistakes_are_named_and_leave_no_files(
    answers: list[Review], settings: dict[str, Any], message: str, first: Path, tmp_path: Path
) -> None:
    labels = write_answers(tmp_path / "labels.csv", answers)
    with pytest.raises(UserError, match=message):
        go_on(first, tmp_path / "run", labels, **settings)
    assert not (tmp_path / "run").exists()


def test_a_run_to_continue_from_has_to_be_complete(
    first: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="holds no run"):
        go_on(tmp_path / "nothing", tmp_path / "run")
    shutil.copytree(first, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not complete; resume it"):
        go_on(tmp_path / "cut", tmp_path / "run")
    source = tmp_path / "source"
    shutil.copytree(folders[0], source)
    (source / "sky").rename(source / "sea")
    with pytest.raises(UserError, match="has other classes than the source"):
        certvol.adapt(source, out=tmp_path / "run", from_run=first)
