"""The paper's baseline: cross-entropy on the same batches of source labels and target pseudo-labels, without CVP's losses."""

from torch import Tensor

from certvol.losses import cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch


class Method(AdaptationMethod):
    summary = "self-training: cross-entropy on source labels and target pseudo-labels"
    uses_split = False

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        logits_NC = self.network.classifier(self.network.features(batch.images_NCHW))
        return {"ce": cross_entropy(logits_NC, batch.labels_N).mean()}
