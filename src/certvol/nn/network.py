"""Join the backbone and the classifier, with the norm mode that they share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.nn import norm
from certvol.nn.backbones import BackboneInfo, create_backbone, last_block
from certvol.nn.heads import Classifier, ResidualLayer
from certvol.nn.projection import Projection
from certvol.randomness import torch_seed
from certvol.settings import ModelConfig

ADAPTER_WIDTH = 256  # most hidden units of the small networks on frozen features


class Network(nn.Module):
    """The backbone f_CNN and the classifier f_Cl.

    Features of a frozen backbone may be projected to fewer dimensions, and changed by an adapter.
    """

    def __init__(
        self, backbone: nn.Module, info: BackboneInfo, num_classes: int, config: ModelConfig
    ) -> None:
        super().__init__()
        frozen = config.train == "head"
        # `auto` starts as mixed: before adaptation only the source passes, and modes do not differ.
        mode: norm.Mode = "mixed" if config.norm == "auto" else config.norm
        self.domains = norm.Domains(mode="frozen" if frozen else mode)
        self.has_batch_norm = norm.install(backbone, self.domains) > 0 and not frozen
        self.backbone = backbone
        # A list hides the compiled twin, which would be a sub-module with weights of its own.
        self._compiled: list[Callable[[Tensor], Tensor]] = []
        self._evaluation_rows = 0
        self.info = info
        self.num_classes = num_classes
        dims = (config.feature_dims or 0) if frozen else 0
        self.projection = Projection(info.dim, dims) if 0 < dims < info.dim else None
        self.dim = info.dim if self.projection is None else dims
        """Dimensions of what `features` returns."""
        layers = config.classifier_layers or (1 if frozen else 2)
        self.classifier = Classifier(self.dim, num_classes, layers, config.dropout)
        adapts = frozen and (layers == 1 if config.adapter is None else config.adapter)
        width = min(self.dim, ADAPTER_WIDTH)
        self.small_width = width if frozen and layers == 1 else None
        """Hidden units of a method's own small networks; None for as many as there are features."""
        self.adapter = ResidualLayer(self.dim, width) if adapts else None
        self.trained_part = config.train
        if self.trained_part != "all":
            backbone.requires_grad_(False)
        if self.trained_part == "last_block":
            last_block(backbone).requires_grad_(True)

    def train(self, mode: bool = True) -> "Network":
        """Keep parts that do not learn in evaluation mode, with fixed statistics."""
        super().train(mode)
        if mode and self.trained_part != "all":
            self.backbone.eval()
            if self.trained_part == "last_block":
                last_block(self.backbone).train()
        return self

    def features(self, inputs: Tensor) -> Tensor:
        """Return features of images, or of N x D features of the frozen backbone.

        Features that were projected before, as those of training are, need no projection.
        """
        features_ND = inputs if inputs.ndim == 2 else self._of_images(inputs)
        if self.projection is not None and features_ND.shape[1] == self.info.dim:
            features_ND = self.projection(features_ND)
        return features_ND if self.adapter is None else self.adapter(features_ND)

    def _of_images(self, images_NCHW: Tensor) -> Tensor:
        images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last)
        if not self._fits_compiled(images_NCHW):
            features_ND: Tensor = self.backbone(images_NCHW)
        elif self.training:
            features_ND = self._compiled[0](images_NCHW)
        else:  # compiled for one number of rows: pad the last batch
            rows = len(images_NCHW)
            padded = F.pad(images_NCHW, (0,) * 7 + (self._evaluation_rows - rows,))
            padded = padded.contiguous(memory_format=torch.channels_last)
            features_ND = self._compiled[0](padded)[:rows]
        return features_ND

    @property
    def compiled(self) -> bool:
        return bool(self._compiled)

    def compile_backbone(self, evaluation_rows: int) -> None:
        """Compile for the training batch and for bf16 evaluation of at most `evaluation_rows`."""
        self._compiled = [torch.compile(self.backbone, dynamic=False)]
        self._evaluation_rows = evaluation_rows

    def _fits_compiled(self, images_NCHW: Tensor) -> bool:
        """Return whether compiled code fits these rows; another shape would compile for minutes."""
        if not self._compiled:  # before len(), which would freeze the batch size in an export
            return False
        rows, split = len(images_NCHW), self.domains.num_source
        if self.training:
            return not self.domains.apart or split in (None, rows, rows // 2)
        autocast = torch.is_autocast_enabled(images_NCHW.device.type)
        return autocast and rows <= self._evaluation_rows

    @contextmanager
    def rows_of(
        self, *, num_source: int | None = None, domain: int = norm.SOURCE
    ) -> Iterator[None]:
        """Declare the domains of the rows that pass inside the context.

        `num_source` counts the source rows of a training batch; `domain` is that of a whole batch.
        """
        before = (self.domains.num_source, self.domains.whole_batch)
        self.domains.num_source, self.domains.whole_batch = num_source, domain
        try:
            yield
        finally:
            self.domains.num_source, self.domains.whole_batch = before


def seeded_backbone(
    config: ModelConfig, image_size: int | None, seed: int
) -> tuple[nn.Module, BackboneInfo]:
    """Create the backbone; its random weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "backbone"))
        return create_backbone(config.backbone, config.weights, image_size, config.hub)
