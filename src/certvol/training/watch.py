"""Look at the model after every cycle: predict fixed images of both domains and score it without labels."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import get_total_norm

from certvol.data.views import Views
from certvol.device import evaluation_batch
from certvol.distributed import Team
from certvol.methods._base import AdaptationMethod, Survey
from certvol.nn.acceleration import uses_bf16
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict.forward import (
    Outputs,
    evaluating,
    gathered,
    mixed_precision,
    run_batches,
    watched_images,
)
from certvol.randomness import numpy_generator
from certvol.scores.validators import Seen, label_free_scores
from certvol.settings import Config
from certvol.training.model_choice import Scores

Indices = NDArray[np.int64]


class Watch:
    """The watched images: some of the target, and some of the source images held out of training."""

    def __init__(
        self,
        method: AdaptationMethod,
        views: Views,
        held_out: Indices,
        source_labels: Indices,
        config: Config,
        team: Team,
    ) -> None:
        self.method, self.views, self.team = method, views, team
        self.source_labels = source_labels
        self.bf16 = uses_bf16(config.training, method.network, views.device)
        images, seed = config.guard.images, config.training.seed
        self.target_images = watched_images(len(views.target), config)
        mixed = numpy_generator(seed, "watched.source").permutation(held_out)
        self.source_images = mixed[: max(1, images // 2)]

    def predict(self, domain: int, images_N: Indices, norm_domain: int) -> Outputs:
        """Predict with the statistics of `norm_domain`; FloatingPointError if they are not finite."""
        share_N = images_N[self.team.share(len(images_N))]
        size = evaluation_batch(self.views.device)
        batches = self.views.test_batches(domain, share_N, size)
        return _finite(
            gathered(run_batches(self.method, batches, norm_domain, self.bf16), self.team)
        )

    def target(self, norm_domain: int = TARGET) -> Outputs:
        return self.predict(TARGET, self.target_images, norm_domain)

    def surveyed(self, survey: Survey) -> Outputs:
        """Return what `target` does for the model that made the survey, without running it again."""
        device = survey.probabilities_NC.device
        rows = torch.from_numpy(self.target_images).to(device)
        with evaluating(self.method, TARGET), mixed_precision(device, self.bf16):
            sigma_N = self.method.sigma(survey.features_ND[rows])
        return _finite(
            Outputs(
                survey.probabilities_NC[rows].float().cpu().numpy(),
                None if sigma_N is None else sigma_N.float().cpu().numpy(),
            )
        )

    def source_accuracy(self) -> float | None:
        """Return the accuracy on held-out source images; None without any."""
        if len(self.source_images) == 0:
            return None
        predicted_N = self.predict(SOURCE, self.source_images, SOURCE).labels_N
        return float((predicted_N == self.source_labels[self.source_images]).mean())

    def features(self, domain: int, images_N: Indices) -> Tensor:
        """Return features on the CPU, by the domain's own statistics."""
        batches = self.views.test_batches(domain, images_N, evaluation_batch(self.views.device))
        with evaluating(self.method, domain):
            return torch.cat([self.method.network.features(batch) for batch in batches]).cpu()

    def scores(self, outputs: Outputs, pretrained_NC: NDArray[np.float32], fitted: bool) -> Scores:
        """Score the model by its predictions of the target and of held-out source images.

        A model `fitted` in closed form classifies the target by the target's own mean and scale, so
        its accuracy on the source says nothing.
        """
        accuracy = None if fitted else self.source_accuracy()
        seen = Seen(outputs.probabilities_NC, outputs.sigma_N, accuracy)
        return label_free_scores(seen, pretrained_NC)


def _finite(outputs: Outputs) -> Outputs:
    if not outputs.finite:
        raise FloatingPointError("the model's predictions are")
    return outputs


def check_finite(method: AdaptationMethod) -> None:
    """Raise FloatingPointError if a weight is not finite: a step changes weights after its loss."""
    weights = [w for w in method.state_dict().values() if w.is_floating_point() and w.numel() > 0]
    if not get_total_norm(weights, norm_type=math.inf).isfinite():
        raise FloatingPointError("the model's weights are")
