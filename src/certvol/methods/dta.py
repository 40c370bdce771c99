"""Drop to Adapt, DTA (Lee et al., ICCV 2019): keep predictions when the units that matter most to
them are dropped.

Implemented: cross-entropy on the source + `agreement_weight` * the mean squared difference of the
probabilities under two draws of dropout on the features. On the target, with logits z1 of the first
draw: `consistency_weight` * KL to z1 of the logits under adversarial dropout of features (channels)
and of hidden units + `entropy_weight` * entropy of z1 + `balance_weight` * class balance of z1 and
of the logits without channels. An adversarial mask drops the features or units that raise the
divergence most, by their gradients; it drops at most the share `channel_drop` or `unit_drop`, which
rises with the progress of adaptation, and scales the others to keep the sum. KL is averaged over
rows and classes, and z1 has gradients.
Deliberate differences: channels are masked behind the last block, which equals masking pooled
features, and the draws of dropout act there too (published: before the last block). Virtual
adversarial training is left out, because its step is measured in pixel values. There is one hidden
layer (published: two of 1,000). The shares rise until the end (published: along a ramp of 30 epochs
of which 20 are trained, so they reach two thirds; 20 with ResNet-50). `model.dropout` acts on the
hidden layer. The published code keeps the best model by target labels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import mean_cross_entropy, mean_or_zero
from certvol.nn.heads import Classifier, Drop
from certvol.nn.network import Network
from certvol.scores.uncertainty import entropy
from certvol.settings import setting

LEAST_SHARE = 1e-6  # of a class, in the class balance


class HiddenClassifier(Classifier):
    """Linear(D, H), ReLU, Linear(H, C), whose features and hidden units can be masked."""

    def __init__(self, dim: int, width: int, num_classes: int, dropout: float) -> None:
        super().__init__(width, num_classes, layers=1, dropout=dropout)
        self.first = nn.Linear(dim, width)

    def forward(self, features: Tensor, drop: Drop | None = None) -> Tensor:
        return self.classify(self.units(features if drop is None else drop(features)), drop)

    def units(self, features: Tensor) -> Tensor:
        return F.relu(self.first(features))

    def classify(self, units: Tensor, drop: Drop | None = None) -> Tensor:
        return super().forward(units, drop)


def divergence(logits_NC: Tensor, reference_NC: Tensor) -> Tensor:
    """Return KL(reference || logits), averaged over rows and classes; both have gradients."""
    log_p, log_q = logits_NC.float().log_softmax(dim=1), reference_NC.float().log_softmax(dim=1)
    return mean_or_zero((log_q.exp() * (log_q - log_p)).mean(dim=1))


def adversarial_mask(gradients_ND: Tensor, share: Tensor) -> Tensor:
    """Return masks that drop what raises the divergence most when dropped, scaled to sum to D.

    Below zero, a gradient by a mask says that the divergence grows without the unit. At most
    floor(share * D) units of a row are dropped: those strictly above the next largest.
    """
    size = gradients_ND.shape[1]
    gain_ND = (-gradients_ND).clamp(min=0)
    limit = (share * size).floor().long().clamp(0, size - 1)
    order_ND = gain_ND.sort(dim=1, descending=True).values
    bound_N1 = order_ND.gather(1, limit.expand(len(gain_ND), 1))
    kept_ND = (gain_ND <= bound_N1).float()
    return kept_ND * (size / kept_ND.sum(dim=1, keepdim=True))


def class_balance(logits_NC: Tensor) -> Tensor:
    """Return minus the mean log share of the classes in the rows; 0 without rows."""
    if len(logits_NC) == 0:
        return logits_NC.float().sum()
    return -(logits_NC.float().softmax(dim=1).mean(dim=0) + LEAST_SHARE).log().mean()


class Method(AdaptationMethod):
    summary = "DTA: keep predictions when the units that matter most to them are dropped"
    batches = "plain"
    ramps = True
    weighted: ClassVar[dict[str, str]] = {
        "agreement": "agreement_weight",
        "channels": "consistency_weight",
        "units": "consistency_weight",
        "entropy": "entropy_weight",
        "balance": "balance_weight",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config:
        width: int = setting(1000, above=0, at_most=2**16, help="Hidden units of the classifier.")
        feature_drop: float = setting(
            0.1, at_least=0, below=1, help="Dropout rate of the two draws on the features."
        )
        channel_drop: float = setting(
            0.01, at_least=0, below=1, help="Final share of features dropped adversarially."
        )
        unit_drop: float = setting(
            0.1, at_least=0, below=1, help="Final share of hidden units dropped adversarially."
        )
        consistency_weight: float = setting(2.0, at_least=0, help="Weight of each divergence.")
        agreement_weight: float = setting(
            2.0, at_least=0, help="Weight of the agreement of two draws on the source."
        )
        entropy_weight: float = setting(0.02, at_least=0, help="Weight of the entropy.")
        balance_weight: float = setting(0.01, at_least=0, help="Weight of each class balance.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        dropout, classes = network.classifier.dropout, network.num_classes
        network.classifier = HiddenClassifier(network.dim, config.width, classes, dropout)

    @property
    def head(self) -> HiddenClassifier:
        head = self.network.classifier
        assert isinstance(head, HiddenClassifier)
        return head

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        head, split, rate = self.head, batch.num_source, self.config.feature_drop
        features_ND = self.network.features(batch.inputs)
        masks_N2D = batch.dropout_masks(features_ND.detach(), 2, rate) / (1 - rate)
        first_ND, second_ND = features_ND * masks_N2D[:, 0], features_ND * masks_N2D[:, 1]
        first_NC, second_SC = (
            head.classify(head.units(rows)).float() for rows in (first_ND, second_ND[:split])
        )
        differ_SC = first_NC[:split].softmax(dim=1) - second_SC.softmax(dim=1)
        terms = {
            "ce": mean_cross_entropy(first_NC[:split], batch.labels_N[:split]),
            "agreement": mean_or_zero(differ_SC.square().mean(dim=1)),
        }
        if batch.adapting:
            terms |= self._target_losses(batch, first_NC[split:], second_ND[split:])
        return terms

    def _target_losses(
        self, batch: Batch, first_TC: Tensor, second_TD: Tensor
    ) -> dict[str, Tensor]:
        head = self.head
        channels_TD, units_TH = self._adversarial_masks(
            batch, first_TC.detach(), second_TD.detach()
        )
        no_channels_TC = head.classify(head.units(second_TD * channels_TD))
        no_units_TC = head.classify(head.units(second_TD) * units_TH)
        return {
            "channels": divergence(no_channels_TC, first_TC),
            "units": divergence(no_units_TC, first_TC),
            "entropy": mean_or_zero(entropy(first_TC.softmax(dim=1))),
            "balance": class_balance(first_TC) + class_balance(no_channels_TC),
        }

    def _adversarial_masks(
        self, batch: Batch, first_TC: Tensor, second_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the masks of features and of hidden units that change the predictions most."""
        head, config = self.head, self.config
        with torch.enable_grad():
            channels_TD = torch.ones_like(second_TD).requires_grad_()
            units_TH = second_TD.new_ones(len(second_TD), head.first.out_features).requires_grad_()
            logits_TC = head.classify(head.units(second_TD * channels_TD) * units_TH)
            by_channel_TD, by_unit_TH = torch.autograd.grad(
                divergence(logits_TC, first_TC), (channels_TD, units_TH)
            )
        return (
            adversarial_mask(by_channel_TD.float(), config.channel_drop * batch.progress),
            adversarial_mask(by_unit_TH.float(), config.unit_drop * batch.progress),
        )
