"""Backbone and classifier together, with the normalisation mode they share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.config import ModelConfig
from certvol.nn import norm
from certvol.nn.backbones import BackboneInfo, create_backbone, last_block
from certvol.nn.heads import Classifier, ResidualLayer
from certvol.seeding import torch_seed

ADAPTER_WIDTH = 256  # most hidden units of the small networks on frozen features


class Network(nn.Module):
    """f_CNN and f_Cl. `features` is the backbone's pooled output, N x D; moved by the adapter, where a frozen one has one."""

    def __init__(self, backbone: nn.Module, info: BackboneInfo, num_classes: int, config: ModelConfig) -> None:
        super().__init__()
        frozen = config.train == "head"
        # `auto` starts as mixed: until adaptation there is only the source, and both candidates are the same.
        mode: norm.Mode = "mixed" if config.norm == "auto" else config.norm
        self.domains = norm.Domains(mode="frozen" if frozen else mode)
        self.has_batch_norm = norm.install(backbone, self.domains) > 0 and not frozen
        self.backbone = backbone
        # In a list, so that the compiled twin is not taken for a sub-module with weights of its own.
        self._compiled: list[Callable[[Tensor], Tensor]] = []
        self._evaluation_rows = 0
        self.info = info
        self.num_classes = num_classes
        layers = config.classifier_layers or (1 if frozen else 2)
        self.classifier = Classifier(info.dim, num_classes, layers, config.dropout)
        adapts = frozen and (layers == 1 if config.adapter is None else config.adapter)
        self.small_width = min(info.dim, ADAPTER_WIDTH) if frozen and layers == 1 else None
        """Hidden units of a method's own small networks; None: as many as the features have dimensions."""
        self.adapter = ResidualLayer(info.dim, min(info.dim, ADAPTER_WIDTH)) if adapts else None
        self.trained_part = config.train
        if self.trained_part != "all":
            backbone.requires_grad_(False)
        if self.trained_part == "last_block":
            last_block(backbone).requires_grad_(True)

    def train(self, mode: bool = True) -> "Network":
        """A part that does not learn stays in evaluation: its statistics do not move either."""
        super().train(mode)
        if mode and self.trained_part != "all":
            self.backbone.eval()
            if self.trained_part == "last_block":
                last_block(self.backbone).train()
        return self

    def features(self, images_NCHW: Tensor) -> Tensor:
        """Of images; or of N x D features that the frozen backbone gave before."""
        features_ND = images_NCHW if images_NCHW.ndim == 2 else self._of_images(images_NCHW)
        return features_ND if self.adapter is None else self.adapter(features_ND)

    def _of_images(self, images_NCHW: Tensor) -> Tensor:
        images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last)  # as the backbone is laid out
        features: Tensor
        if not self._compiled or not self._fits_compiled(images_NCHW):
            features = self.backbone(images_NCHW)
        elif self.training:
            features = self._compiled[0](images_NCHW)
        else:  # compiled for one number of rows: the last batch is filled up to it
            rows = len(images_NCHW)
            filled = F.pad(images_NCHW, (0,) * 7 + (self._evaluation_rows - rows,))
            features = self._compiled[0](filled.contiguous(memory_format=torch.channels_last))[:rows]
        return features

    @property
    def compiled(self) -> bool:
        return bool(self._compiled)

    def compile_backbone(self, evaluation_rows: int) -> None:
        """For the training batch's shape and for evaluation in mixed precision by batches of `evaluation_rows` at most."""
        self._compiled, self._evaluation_rows = [torch.compile(self.backbone, dynamic=False)], evaluation_rows

    def _fits_compiled(self, images_NCHW: Tensor) -> bool:
        """Every other shape, precision or split of domains would be compiled anew, for minutes."""
        if not self.training:
            return torch.is_autocast_enabled(images_NCHW.device.type) and len(images_NCHW) <= self._evaluation_rows
        rows, split = len(images_NCHW), self.domains.num_source
        return not self.domains.apart or split in (None, rows, rows // 2)

    @contextmanager
    def rows_of(self, *, num_source: int | None = None, domain: int = norm.SOURCE) -> Iterator[None]:
        """Inside: whose rows are passing, by their number (training) or as a whole (evaluation)."""
        before = (self.domains.num_source, self.domains.whole_batch)
        self.domains.num_source, self.domains.whole_batch = num_source, domain
        try:
            yield
        finally:
            self.domains.num_source, self.domains.whole_batch = before


def seeded_backbone(config: ModelConfig, image_size: int | None, seed: int) -> tuple[nn.Module, BackboneInfo]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "backbone"))
        return create_backbone(config.backbone, config.weights, image_size, config.hub)
