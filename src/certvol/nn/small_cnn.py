"""A small network for images of 32 pixels or less, quick to train from scratch on a CPU."""

from torch import Tensor, nn

DIM = 128
IMAGE_SIZE = 32
MEAN = STD = (0.5, 0.5, 0.5)


class SmallCNN(nn.Module):
    """Map normalised images [N, 3, H, W] to features [N, 128] by four convolutions with BatchNorm.

    The first convolution halves the side: at full resolution it alone would cost as much as all the
    others.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32, 2), (32, 64, 2), (64, 128, 2), (128, DIM, 1))
        self.stages = nn.Sequential(*(_block(*size) for size in sizes))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_NCHW: Tensor) -> Tensor:
        features_ND: Tensor = self.pool(self.stages(images_NCHW))
        return features_ND


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))
