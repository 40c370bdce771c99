"""`adapt` makes a run, `evaluate` measures one, `extract` writes features."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from certvol import methods
from certvol.config import Config, absolute_path, flatten, read_settings_file, resolve
from certvol.environment import describe_environment
from certvol.errors import UserError
from certvol.evaluation import evaluate
from certvol.extraction import extract
from certvol.job import Job, Run
from certvol.reporting import Reporter, Silent
from certvol.stopping import StopSignal
from certvol.tables import read_metrics, write_text
from certvol.training.checkpoint import read_about
from certvol.training.delivery import Delivery
from certvol.training.distributed import join_team
from certvol.training.run_folder import RunFolder

__all__ = ["Run", "adapt", "evaluate", "extract", "resolve_settings"]


def resolve_settings(
    preset: str | None = None, config_file: str | Path | None = None, settings: Mapping[str, Any] | None = None
) -> Config:
    """Preset, file and settings (`{"training.cycles": 4}` or `{"training": {"cycles": 4}}`) in one checked Config."""
    file = read_settings_file(Path(config_file)) if config_file is not None else {}
    return resolve(methods.config_classes(), preset or "default", file, flatten(settings or {}, "settings"))


def adapt(
    source: str | Path | None = None,
    target: str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    reporter: Reporter | None = None,
    stop_signal: StopSignal | None = None,
    **settings: Any,
) -> Run:
    """Pretrains, adapts, predicts; everything it makes is in the folder `out`. `resume`: goes on with a run that was stopped.

    Settings are given by section: `adapt(S, T, out="run", training={"cycles": 40}, method={"name": "basic"})`.
    """
    reporter, stop_signal = reporter or Silent(), stop_signal or StopSignal()
    if resume is not None:
        if settings or any(given is not None for given in (source, target, out, preset, config)):
            raise UserError("--resume goes on with a run as it was begun: give no other options with it")
        return _resume(RunFolder(resume), reporter, stop_signal)
    places = {f"data.{k}": str(v) for k, v in (("source", source), ("target", target)) if v is not None}
    resolved = _anchored(resolve_settings(preset, config, {**flatten(settings, "settings"), **places}))
    for name in ("source", "target"):
        if getattr(resolved.data, name) is None:
            raise UserError(
                f"no {name} folder was given: use --{name} FOLDER (to try a method without one: `certvol demo --out RUNS "
                "--methods NAME`)"
            )
    if out is None or not str(out):
        raise UserError("no folder for the run was given: use --out FOLDER")
    team, device = join_team(resolved.training.device)
    run = RunFolder(out, writes=team.main)
    if team.main:
        run.check_free()
    job = Job(run, resolved, reporter, stop_signal, team, device)
    if not team.main:
        return job.run_to_end()
    run.create()
    with run.lock():
        write_text(run.config, job.config.to_yaml())
        run.write_json(run.environment, describe_environment(device))
        return job.run_to_end()


def _anchored(config: Config) -> Config:
    data = replace(
        config.data,
        source=absolute_path(config.data.source),
        target=absolute_path(config.data.target),
        cache_dir=absolute_path(config.data.cache_dir),
    )
    return replace(config, data=data, model=replace(config.model, weights=absolute_path(config.model.weights)))


def _resume(run: RunFolder, reporter: Reporter, stop_signal: StopSignal) -> Run:
    if not run.holds_a_run:
        raise UserError(
            f"{run.path} holds no run to go on with (no config.yaml); start one with --source, --target and --out"
        )
    run.check_links()
    if run.finished:
        reporter.say(f"{run.path} is complete already")
        try:
            about = read_about(run.model)
            metrics = read_metrics(run.metrics) if run.metrics.exists() else None
            return Run(run.path, metrics, Delivery(about["delivered"], about["why"], about["norm"]))
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
            raise UserError(f"the run {run.path} is complete, but its files are damaged: {error}") from None
    config = resolve_settings(config_file=run.config)
    team, device = join_team(config.training.device)
    run = RunFolder(run.path, writes=team.main)
    with run.lock() if team.main else nullcontext():
        run.note_resumption(describe_environment(device))
        return Job(run, config, reporter, stop_signal, team, device).run_to_end()
