"""Train, evaluate and extract from Python: the functions behind the commands of these names."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol import methods
from certvol.data.sources import expand_domains, joined, places_of, with_sources
from certvol.data.target_prior import WORDS
from certvol.distributed import join_team
from certvol.errors import Interrupted, UserError
from certvol.predict import extract as extraction
from certvol.predict.estimates import HeldOut
from certvol.predict.evaluate import evaluate, target_labels
from certvol.predict.max_error import Judged, compare_reviews
from certvol.predict.model import Model, load
from certvol.predict.outcome import TargetOfRun, run_metrics, run_target, write_outcome
from certvol.predict.random_sample import drawn_in
from certvol.predict.verdict import make_verdict, read_verdict
from certvol.progress import Reporter, Silent, StopSignal, cpu_seconds
from certvol.runs.checkpoint import DAMAGE, OtherFormat, read_about, write_tensors
from certvol.runs.continued import settings_from
from certvol.runs.environment import describe_environment, origin_of, target_fingerprint
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import (
    check_same_target,
    keep_drawn,
    keep_trained,
    reviewed_run,
    trained_on,
)
from certvol.runs.outputs import check_outside
from certvol.runs.tables import label_cell, read_metrics, write_text
from certvol.settings import Config, absolute_path, flatten, read_settings_file, resolve
from certvol.training import named_choices, pseudo_labels
from certvol.training.model_choice import Delivery
from certvol.training.setup import Job

OPTIONS = {  # of `certvol adapt`, by the settings that they give
    "data.source": "source",
    "data.more_sources": "source",
    "data.target": "target",
    "data.target_labels": "labels",
}

__all__ = ["Run", "adapt", "evaluate", "extract", "resolve_settings"]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    metrics: dict[str, Any] | None
    """The content of metrics.json; None if the target has no labels."""
    delivery: Delivery
    verdict: dict[str, Any] | None = None
    """The content of verdict.json; None for a run of an older version."""

    def model(self) -> Model:
        return load(self.path)


def resolve_settings(
    preset: str | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_run: str | Path | None = None,
) -> Config:
    """Merge preset, file and settings, and check them.

    Settings may be flat (`{"training.cycles": 4}`) or nested (`{"training": {"cycles": 4}}`). With
    `from_run`, the settings of that run take the place of preset and file.
    """
    file = read_settings_file(Path(config_file)) if config_file is not None else {}
    if from_run is not None:
        if preset is not None or config_file is not None:
            raise UserError(
                "--from takes the settings of its run; give single settings with it, not --preset "
                "or --config"
            )
        file = settings_from(from_run, flatten(settings or {}, "settings"))
    given, rules = flatten(settings or {}, "settings"), pseudo_labels.config_classes()
    return resolve(
        methods.config_classes(), preset or "default", file, given, rules, named_choices()
    )


def adapt(
    source: str | Path | Sequence[str | Path] | None = None,
    target: str | Path | None = None,
    out: str | Path | None = None,
    *,
    from_run: str | Path | None = None,
    target_labels: str | Path | None = None,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    preset: str | None = None,
    config: str | Path | None = None,
    reporter: Reporter | None = None,
    stop_signal: StopSignal | None = None,
    **settings: Any,
) -> Run:
    """Pretrain, adapt and predict, and write everything to the folder `out`.

    Settings are given by section: `adapt(S, T, out="run", training={"cycles": 40},
    method={"name": "basic"})`. `from_run` starts from the delivered model of a complete run, with
    its folders and settings, instead of pretraining. `source` may be a list of several, which are
    joined. `target_labels` is a CSV of reviewed target images to train on. `resume` continues a run
    that was stopped, with the settings that it began with. If its config.yaml was edited,
    `accept_changes` continues with the new ones. With `target_labels`, it takes labels of a run
    whose target was another one, by their paths.
    """
    reporter, stop_signal = reporter or Silent(), stop_signal or StopSignal()
    if resume is not None:
        others = (source, target, out, from_run, target_labels, preset, config)
        if settings or any(given is not None for given in others):
            raise UserError(
                "--resume continues a run with its own settings; give no other options with it"
            )
        return _resume(RunFolder(resume), reporter, stop_signal, accept_changes)
    places = {"data.target": target, "data.target_labels": target_labels}
    given = {name: str(place) for name, place in places.items() if place is not None}
    of_sources: dict[str, Any] = {}
    if source is not None:
        first, *more = [source] if isinstance(source, str | Path) else source
        of_sources = {"data.source": str(first), "data.more_sources": joined(more)}
    given = _without_conflict(flatten(settings, "settings"), {**of_sources, **given})
    resolved = resolve_settings(preset, config, given, from_run)
    resolved = with_absolute_paths(resolved)
    labels = resolved.data.target_labels
    if accept_changes and labels is None:
        raise UserError("--accept-changes is for --resume and --labels; leave it out")
    for name in ("source", "target"):
        if getattr(resolved.data, name) is None:
            raise UserError(
                f"no {name} folder given; add --{name} FOLDER, or try a method on generated images "
                "with `certvol demo --out RUNS --methods NAME`"
            )
    if out is None or not str(out):
        raise UserError("no folder for the run given; add --out FOLDER")
    resolved = _with_domains(resolved, reporter)
    check_outside(out, [*places_of(resolved.data), resolved.data.target])
    team, device = join_team(resolved.training.device)
    run = RunFolder(out, writes=team.main)
    if team.main:
        run.check_free()
    job = Job(run, resolved, reporter, stop_signal, team, device)
    if labels is not None and not accept_changes:
        check_same_target(labels, job.target.fingerprint)
    if not team.main:
        return _run_to_end(job)
    run.create()
    with run.lock():
        write_text(run.config, job.config.to_yaml())
        origin = {"origin": origin_of(str(resolved.data.target))}
        target_of_run = {"target": job.target.fingerprint}
        run.write_json(run.environment, describe_environment(device) | origin | target_of_run)
        return _run_to_end(job)


def _without_conflict(settings: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings with those that arguments of their own give; UserError if they differ."""
    for name, place in places.items():
        if name in settings and str(settings[name]) != str(place):
            option = OPTIONS[name]
            raise UserError(
                f"`{name}` and --{option} differ: {settings[name]} and {place or 'no more'}; give "
                f"all places by --{option}"
            )
    return {**settings, **places}


def _resume(
    run: RunFolder, reporter: Reporter, stop_signal: StopSignal, accept_changes: bool
) -> Run:
    run.check_run()
    if run.finished:
        reporter.say(f"{run.path} is already complete")
        try:
            about = read_about(run.model)
            metrics = read_metrics(run.metrics) if run.metrics.exists() else None
            verdict = read_verdict(run.verdict) if run.verdict.exists() else None
            delivery = Delivery(about["delivered"], about["why"], about["norm"])
            return Run(run.path, metrics, delivery, verdict)
        except OtherFormat as error:
            raise UserError(f"weights file {run.model} {error}") from None
        except DAMAGE as error:
            raise UserError(
                f"the run {run.path} is complete, but its files are damaged: {error}"
            ) from None
    config = resolve_settings(config_file=run.config)
    team, device = join_team(config.training.device)
    run = RunFolder(run.path, writes=team.main)
    with run.lock() if team.main else nullcontext():
        job = Job(run, config, reporter, stop_signal, team, device)
        job.accepts_changes = accept_changes
        # Until the first checkpoint, the target may still change.
        run.note_resumption(describe_environment(device), {"target": job.target.fingerprint})
        return _run_to_end(job)


def _run_to_end(job: Job) -> Run:
    """Train, predict and write the results; after a stop, say how to resume."""
    try:
        return _finish(job)
    except Interrupted as stopped:
        if not job.run.holds_a_run:
            raise
        message = f"stopped; resume with `certvol adapt --resume {job.run.path}`"
        raise Interrupted(message, stopped.exit_code) from None


def _finish(job: Job) -> Run:
    started, run, team = time.monotonic(), job.run, job.team
    cpu_before = cpu_seconds()
    # Restore the caller's random state afterwards, at least on the CPU.
    with torch.random.fork_rng(devices=[]), job.memory_explained():
        _keep_known(job)
        delivery = job.train()
        model = Model(job.method, job.source.classes, job.config, job.device)
        # Training has ended: only now may the labels of the target be read.
        place = str(model.config.data.target)
        true_N = target_labels(job.target, place, model.classes, job.reporter)
        target = TargetOfRun(job.target.paths, job.views, true_N)
        held_out = HeldOut(job.held_out, job.source.labels[job.held_out])
        outcome = run_target(run, model, target, held_out, team, job.reporter)
        judged = _judged(job, outcome.adapted.labels_N)
        verdict = make_verdict(outcome.evidence, model.classes, judged, len(target.paths))
        temperature = verdict["temperature"]
        outcome = outcome.at_temperature(temperature["delivered"])
    delivered = {"model": delivery.model, "why": delivery.why, "norm": delivery.mode}
    metrics = run_metrics(run, model, target, outcome, delivered)
    if team.main:
        write_outcome(run, model.classes, target, outcome, metrics)
        run.write_json(run.verdict, verdict)
        seconds = time.monotonic() - started
        spent = cpu_seconds() - cpu_before - job.cpu_extracting
        run.note_time({"phase": "all", "seconds": seconds, "cpu_seconds": spent})
        about = {
            **job.about(delivery.mode),
            "delivered": delivery.model,
            "why": delivery.why,
            "model_temperature": temperature["delivered"],
            "pretrained_temperature": temperature["pretrained"],
        }
        write_tensors(run.model, outcome.weights, about)
    team.leave()
    return Run(run.path, metrics, delivery, verdict)


def _judged(job: Job, predicted_N: NDArray[np.int64]) -> Judged | None:
    """Compare the model with the random labels that the run was given, if any."""
    if job.given is None:
        return None
    cells = [label_cell(name) for name in job.source.classes]
    labels = [cells[label] for label in predicted_N]
    judged = compare_reviews(job.given.reviews, job.target.paths, labels, trained_on(job.run))
    return judged if judged.labels else None


def _keep_known(job: Job) -> None:
    """Note which images train, and how the random ones were drawn that judge the run."""
    run, given, target = job.run, job.given, job.target
    if given is not None:
        given.keep(run)
    keep_trained(run, job.config.model.start, target.paths, target.hashes)
    if given is not None and not run.drawn.exists():
        reviewed = reviewed_run(job.config)
        if reviewed and target_fingerprint(reviewed) not in (None, target.fingerprint):
            reviewed = None
        random = [each for each in given.reviews if each.kind == "random"]
        keep_drawn(run, drawn_in(reviewed, random, len(target)))


def with_absolute_paths(config: Config) -> Config:
    """Make the paths among the settings absolute, so that a run can be resumed from anywhere."""

    def absolute(section: Any, *names: str) -> Any:
        return replace(section, **{name: absolute_path(getattr(section, name)) for name in names})

    files = ("target", "target_labels", "cache_dir")
    prior = () if config.data.target_prior in WORDS else ("target_prior",)
    data = absolute(config.data, *files, *prior)
    if data.source is not None:
        data = with_sources(data, [str(absolute_path(place)) for place in places_of(data)])
    return replace(config, data=data, model=absolute(config.model, "weights", "start"))


def _with_domains(config: Config, reporter: Reporter) -> Config:
    """Replace a source that is a folder of domains by these domains, without the target."""
    places, said = expand_domains(places_of(config.data), config.data.target)
    for sentence in said:
        reporter.say(sentence)
    return replace(config, data=with_sources(config.data, places)) if said else config


def extract(
    folder: str | Path,
    out: str | Path,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    reporter: Reporter | None = None,
    **settings: Any,
) -> int:
    """Write the features of a folder's images to the `.npz` file `out`; return how many images.

    Give settings as in `adapt`. Only those of the sections `data`, `augment` and `model`, and
    `training.device`, have an effect. Unlike in `adapt`, `data.views` is 1 by default.
    """
    file = {"data.views": 1, **({} if config is None else read_settings_file(Path(config)))}
    given = flatten(settings, "settings")
    resolved = resolve(methods.config_classes(), preset or "default", file, given)
    return extraction.extract(folder, out, resolved, reporter)
