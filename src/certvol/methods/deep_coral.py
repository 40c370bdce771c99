"""Deep CORAL (Sun and Saenko, ECCV-W 2016): match the covariances of source and target rows of a
batch.

Implemented: cross-entropy on the source + `weight` * |cov_s - cov_t|^2 / (4 d^2), covariances of
the batch with n - 1, on the logits (as in the paper) or on the backbone's features.
Deliberate differences: the paper sets its weight so that both terms are of similar size at the end
of training; here it is 1 and yours to set. The classifier is the common one (two layers, dropout)
and learns at the backbone's rate; the paper's new layer learns 10 times as fast
(`training.head_rate 10`). `target_ce` is not in the paper.
Covariances of few rows are mostly noise, which falls with the fourth power of the logits' scale:
with 64 rows per domain, three quarters of the term remain between two batches of one domain, and
shrinking logits is its easiest way down. Larger batches have less noise (`training.batch_size 256`
has the paper's 128 rows per domain).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods._domain_loss import DomainLossMethod
from certvol.methods._losses import coral
from certvol.settings import setting


class Method(DomainLossMethod):
    summary = "Deep CORAL: match the covariances of source and target in each batch"
    weighted: ClassVar[dict[str, str]] = {"coral": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(DomainLossMethod.Config):
        layer: Literal["logits", "features"] = setting(
            "logits", help="Layer whose covariances are compared."
        )

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        compared = logits_NC if self.config.layer == "logits" else rows_NB
        return {"coral": coral(*compared.tensor_split([batch.num_source]))}
