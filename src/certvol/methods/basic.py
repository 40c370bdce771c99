"""The paper's baseline: cross-entropy on source labels and pseudo-labels, on CVP's batches."""

from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import cross_entropy


class Method(AdaptationMethod):
    summary = "self-training: cross-entropy on source labels and target pseudo-labels"
    uses_split = False

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        logits_NC = self.network.classifier(self.network.features(batch.inputs))
        return {"ce": cross_entropy(logits_NC, batch.labels_N).mean()}
