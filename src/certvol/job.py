"""One run from its images or features to its files: trained, predicted, measured, written."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol import analysis
from certvol.acceleration import prepare, uses_bf16
from certvol.config import Config
from certvol.data.batches import LEAST_TO_HOLD_OUT, hold_out
from certvol.errors import RunFailed, UserError
from certvol.evaluation import target_labels
from certvol.inference import Outputs
from certvol.inputs import open_inputs, open_views
from certvol.kept_warnings import KeptWarnings
from certvol.metrics import accuracy, mean_class_accuracy
from certvol.model import Model, create_method, load
from certvol.nn.norm import SOURCE, TARGET
from certvol.nn.teacher import Teacher
from certvol.reporting import Reporter, Silent
from certvol.stopping import StopSignal
from certvol.tables import figures, predictions_csv, write_text
from certvol.training.checkpoint import FORMAT, load_into, read_tensors, write_tensors
from certvol.training.delivery import Delivery
from certvol.training.distributed import Team
from certvol.training.memory import largest_batch
from certvol.training.run_folder import RunFolder
from certvol.training.schedule import steps_of_run
from certvol.training.tensorboard import TensorBoard
from certvol.training.trainer import Trainer

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    metrics: dict[str, Any] | None
    """None where the target folder tells no labels."""
    delivery: Delivery

    def model(self) -> Model:
        return load(self.path)


class Job:
    """One run. Made before anything is written, so that a mistake leaves nothing behind."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        reporter: Reporter,
        stop_signal: StopSignal,
        team: Team,
        device: torch.device,
    ) -> None:
        self.run, self.team, self.device = run, team, device
        self.reporter, self.stop_signal = KeptWarnings(reporter if team.main else Silent(), run), stop_signal
        if config.training.tensorboard and team.main:
            run.journal.follower = TensorBoard(run.journal.history, run.path / "tensorboard")
        self.inputs = open_inputs(config, self.reporter)
        self.config = config = self.inputs.config
        self.source, self.target, self.info = self.inputs.source, self.inputs.target, self.inputs.info
        self.method = create_method(config, self.inputs.backbone, self.info, len(self.source.classes))
        if config.training.teacher > 0 and self.method.teacher is None:
            self.method.teacher = Teacher(self.method, self.method.network, config.training.teacher)
        elif config.training.teacher > 0:
            self.reporter.warn(
                f"{config.method_name} has a teacher of its own: `method.teacher_decay` counts, and `training.teacher` does not"
            )
        self._check_choice()

    def _check_choice(self) -> None:
        """Before training: a score that this run will not have cannot choose."""
        select, share = self.config.guard.select, self.config.data.holdout
        if select == "source_accuracy":
            if self.method.closed_form:
                raise UserError(
                    f"`guard.select source_accuracy` does not go with {self.config.method_name}, which is fitted to the target"
                )
            if share == 0:
                raise UserError(
                    "`guard.select source_accuracy` needs held-out source images: set `data.holdout` above 0"
                )
            classes = len(self.source.classes)
            if len(hold_out(self.source.labels, classes, share, self.config.training.seed)[1]) == 0:
                raise UserError(
                    f"`guard.select source_accuracy` needs held-out source images, and none of the {classes} classes has the "
                    f"{LEAST_TO_HOLD_OUT} images from which one is held out: add images, or choose another score"
                )
        if select == "sigma" and self.method.sigma(torch.zeros(1, self.info.dim)) is None:
            raise UserError(
                f"`guard.select sigma` needs a method with a sigma, which {self.config.method_name} has not"
            )

    def run_to_end(self) -> Run:
        try:
            with torch.random.fork_rng(devices=[]):  # whoever calls keeps their own random numbers, on the CPU at least
                return self._run_to_end()
        except torch.OutOfMemoryError:
            training, on_gpu = self.config.training, True
        except RuntimeError as error:
            if "allocate" not in str(error):  # what torch says where the machine's own memory is used up
                raise
            training, on_gpu = self.config.training, False
        if not on_gpu:
            raise RunFailed(
                f"too little memory for `training.batch_size {training.batch_size}`: lower it, or `method.num_samples` where the "
                "method has it"
            )
        fits = None
        if self.config.model.train != "head":
            fits = largest_batch(self.method, uses_bf16(training, self.method.network, self.device), self.device)
        about = "" if fits is None else f" (about {fits} would fit)"
        raise RunFailed(
            f"the GPU ran out of memory: lower `training.batch_size`, now {training.batch_size}{about}, or `data.device_share`, "
            f"now {self.config.data.device_share:g}, so that images stay in RAM"
        )

    def _run_to_end(self) -> Run:
        started = time.monotonic()
        self.reporter.flush()
        config = self.config
        prepare(self.method, config.training, self.device, steps_of_run(config.training, self.method))
        self.method.network.domains.synchronised = config.model.sync_norm and self.team.size > 1
        views, place = open_views(self.inputs, self.method.network, self.device, self.run, self.reporter)
        precision = " in bf16" if uses_bf16(config.training, self.method.network, self.device) else ""
        self.reporter.say(
            f"{len(self.source)} source images in {len(self.source.classes)} classes, {len(self.target)} target images; "
            f"{config.method_name} on {self.info.name}, {self.device}{precision}; {place}"
        )
        trainer = Trainer(
            self.run,
            config,
            self.method,
            views,
            self.source.labels,
            self.reporter,
            self._about("mixed"),
            self.inputs.fingerprints,
            self.stop_signal,
            self.team,
        )
        with self.stop_signal.deferred():
            delivery = trainer.fit()
        if self.run.journal.follower is not None:
            self.run.journal.follower.close()
        outputs = self._predict(trainer, TARGET, "predicting the target")
        weights = {name: tensor.clone() for name, tensor in self.method.state_dict().items()}
        # Training has ended: only now does a run look for target labels, there where all folders are named like source classes.
        true_N = target_labels(self.target, str(config.data.target), self.source.classes)
        seen = self._measure(trainer, outputs, true_N)
        if self.team.main or true_N is not None:
            load_into(self.method, read_tensors(self.run.pretrained), self.run.pretrained.name)
        metrics = self._metrics(trainer, outputs, delivery, true_N)
        pretrained_KD = self._pretrained_features(trainer, seen.shown_K)
        if self.team.main:
            paths, classes, run = self.target.paths, self.source.classes, self.run
            write_text(run.predictions, predictions_csv(paths, classes, outputs))
            if metrics is not None:
                run.write_json(run.metrics, metrics)
            analysis.write_measures(run.measures, paths, classes, seen.measured, true_N)
            analysis.write_evaluation(
                run.evaluation, analysis.figures(seen.measured, classes, true_N, seen.oscillation)
            )
            analysis.write_features(run.features, paths, seen.shown_K, pretrained_KD, seen.shown_KD)
            self.run.note_time({"phase": "all", "seconds": time.monotonic() - started})
            about = {**self._about(delivery.mode), "delivered": delivery.model, "why": delivery.why}
            write_tensors(self.run.model, weights, about)
        self.team.part()
        return Run(self.run.path, metrics, delivery)

    def _about(self, mode: str) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "method": self.config.method_name,
            "backbone": self.info.name,
            "classes": self.source.classes,
            "norm": mode,
        }

    def _predict(self, trainer: Trainer, statistics: int, what: str) -> Outputs:
        everything = np.arange(len(self.target))
        self.reporter.start(what, len(everything))
        outputs = trainer.predict(TARGET, everything, statistics, exact=True)
        self.reporter.advance(len(everything))
        self.reporter.finish()
        return outputs

    def _measure(self, trainer: Trainer, outputs: Outputs, true_N: Indices | None) -> "_Seen":
        """One more pass over the target, for what the predictions do not hold."""
        count, seed = len(self.target), self.config.training.seed
        shown_K = analysis.feature_images(count, seed)
        picked_K = np.empty(0, np.int64) if true_N is None else analysis.oscillation_images(true_N, seed)
        if not analysis.oscillation_is_cheap(len(picked_K), self.method):
            picked_K = picked_K[:0]
        kept_K = np.union1d(shown_K, picked_K)
        share = self.team.share(count)
        mine_K = kept_K[(kept_K >= share.start) & (kept_K < share.stop)] - share.start
        batches = trainer.views.test_batches(TARGET, np.arange(count)[share], trainer.eval_batch)
        self.reporter.start("measuring certainty", count)
        found = analysis.measure(
            self.method, batches, TARGET, self.config.training, None if true_N is None else true_N[share], mine_K
        )
        measured = analysis.agreeing(analysis.gathered(found, self.team), outputs)
        features_KD = measured.features_KD
        picked_KD = features_KD[np.searchsorted(kept_K, picked_K)]
        oscillation = analysis.oscillation(picked_KD, self.method) if len(picked_K) and self.team.main else None
        self.reporter.advance(count)
        self.reporter.finish()
        return _Seen(measured, shown_K, features_KD[np.searchsorted(kept_K, shown_K)], oscillation)

    def _pretrained_features(self, trainer: Trainer, images_K: Indices) -> NDArray[np.float32]:
        """Where `method` holds the pretrained model."""
        batches = trainer.views.test_batches(TARGET, images_K, trainer.eval_batch)
        return analysis.features(self.method, batches, SOURCE) if self.team.main else np.empty((0, 0), np.float32)

    def _metrics(
        self, trainer: Trainer, adapted: Outputs, delivery: Delivery, true_N: Indices | None
    ) -> dict[str, Any] | None:
        """Where `method` holds the pretrained model; None without labels."""
        if true_N is None:
            return None
        source_only = self._predict(trainer, SOURCE, "predicting with the pretrained model")
        return {
            "source_only": figures(source_only.labels_N, true_N, self.source.classes),
            "adapted": figures(adapted.labels_N, true_N, self.source.classes),
            "delivered": {"model": delivery.model, "why": delivery.why, "norm": delivery.mode},
            "watched": self._watched_figures(true_N[trainer.watched]) if self.team.main else None,
        }

    def _watched_figures(self, true_N: NDArray[np.int64]) -> dict[str, Any]:
        """Of every cycle, on the images whose predictions were kept: what a choice of checkpoint is judged by."""
        num_classes = len(self.source.classes)
        kept = [(cycle, probabilities.argmax(axis=1)) for cycle, _, probabilities in self.run.journal.read_cycles()]
        return {
            "images": len(true_N),
            "cycles": [cycle for cycle, _ in kept],
            "accuracy": [accuracy(labels, true_N) for _, labels in kept],
            "mean_class_accuracy": [mean_class_accuracy(labels, true_N, num_classes) for _, labels in kept],
        }


@dataclass(frozen=True)
class _Seen:
    """What a last look at the target gives beside the predictions."""

    measured: analysis.Measured
    shown_K: Indices
    """Images that show their features, `shown_KD`."""
    shown_KD: NDArray[np.float32]
    oscillation: dict[str, Any] | None
