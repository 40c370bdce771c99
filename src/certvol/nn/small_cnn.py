"""A small network for tiny images (32 pixels and below), to be trained from scratch, on a CPU if need be."""

from torch import Tensor, nn

DIM = 128
IMAGE_SIZE = 32
MEAN = STD = (0.5, 0.5, 0.5)


class SmallCNN(nn.Module):
    """Normalised images [N, 3, H, W] to features [N, 128]: four 3 x 3 convolutions, each with BatchNorm and ReLU, average pool.

    The first convolution halves the side at once: at full resolution it alone would cost as much as all the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            _block(3, 32, stride=2),
            _block(32, 64, stride=2),
            _block(64, 128, stride=2),
            _block(128, DIM, stride=1),
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_NCHW: Tensor) -> Tensor:
        features_ND: Tensor = self.pool(self.stages(images_NCHW))
        return features_ND


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
