"""The settings of the data: source and target, decoding, and random changes to images."""

from dataclasses import dataclass
from typing import Literal

from certvol.settings.declare import setting

MIN_IMAGE_SIZE = 8  # pixels


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source and the target, and how images are decoded and stored."""

    source: str | None = setting(
        None,
        affects_result=False,
        help="Folder of labelled images with one sub-folder per class, a folder of such folders "
        "(domains), or a .npz of features.",
    )
    more_sources: str | None = setting(
        None,
        affects_result=False,
        help="Further sources, separated by `:` (repeat --source); the classes of all are joined.",
    )
    target: str | None = setting(
        None,
        affects_result=False,
        help="Folder of images to adapt to, in any layout, or a .npz. Training never reads its "
        "labels.",
    )
    target_prior: str = setting(
        "unknown",
        help="How often each class occurs in the target: unknown, balanced (all classes, about "
        "equally often), source (as in the source), or a CSV of class and share.",
    )
    target_classes: str | None = setting(
        None, help="Classes that occur in the target, separated by commas; null: any of them."
    )
    target_labels: str | None = setting(
        None,
        help="CSV of reviewed target images, as `certvol review` writes it: the only labels of the "
        "target that training sees.",
    )
    label_kinds: Literal["chosen", "all"] = setting(
        "chosen",
        help="Reviewed labels that train. chosen: the random ones are kept to judge the new model; "
        "all: the random ones train too, and new ones must judge it.",
    )
    image_size: int | None = setting(
        None,
        at_least=MIN_IMAGE_SIZE,
        at_most=2**14,
        help="Side in pixels of the network's input; null: the size the backbone was trained with.",
    )
    cache_dir: str | None = setting(
        None,
        affects_result=False,
        help="Folder for decoded images; null: $CERTVOL_CACHE, else the user's cache folder.",
    )
    cache_limit_gb: float = setting(
        50.0,
        above=0,
        at_most=1e6,
        affects_result=False,
        help="Largest size of the cache; the least recently used images are deleted first.",
    )
    workers: int = setting(
        0,
        at_least=0,
        at_most=1024,
        affects_result=False,
        help="Processes that decode images; 0: one per core.",
    )
    device_share: float = setting(
        0.5,
        at_least=0,
        affects_result=False,
        help="Keep decoded images on the GPU if they fit into this share of its free memory.",
    )
    holdout: float = setting(
        0.1,
        at_least=0,
        at_most=0.5,
        help="Share of the source kept out of training, to notice when a model gets worse.",
    )
    views: int = setting(
        4,
        above=0,
        at_most=1024,
        help="With model.train head: views per image to extract; the first is the test view.",
    )
    view_set: Literal["random", "shifted"] = setting(
        "random",
        help="With model.train head. random: the test view and augmented ones (data.views); "
        "shifted: one view, the mean of 9 shifted crops and their mirror images.",
    )
    max_megapixels: float = setting(
        179.0,
        above=0,
        at_most=10_000,
        help="Skip images above this size, which may be decompression bombs.",
    )
    decode_seconds: float = setting(
        60.0,
        above=0,
        at_most=86_400,
        affects_result=False,
        help="Skip images that take more processor time than this to decode.",
    )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes to training images; all geometric ones are applied in one warp."""

    enabled: bool = setting(True, help="Draw random views; false: train on the test view.")
    crop_area: float = setting(
        0.75,
        above=0,
        at_most=1,
        help="Smallest share of the image's area that a random crop keeps.",
    )
    crop_aspect: float = setting(
        1.3333333333333333,
        above=0,
        at_most=100,
        help="Largest change of aspect ratio by a random crop.",
    )
    flip: bool = setting(True, help="Mirror half of the views left to right.")
    rotate: float = setting(
        10.0, at_least=0, at_most=360, help="Largest rotation in degrees, either way."
    )
    shear: float = setting(
        10.0, at_least=0, at_most=90, help="Largest shear in degrees, either way."
    )
    shift: float = setting(
        0.025, at_least=0, at_most=10, help="Largest shift as a share of the side, either way."
    )
    scale: float = setting(0.025, at_least=0, at_most=10, help="Largest zoom, either way.")
    grey: float = setting(0.2, at_least=0, at_most=1, help="Probability of a grey view.")
    jitter: float = setting(
        0.05,
        at_least=0,
        at_most=1,
        help="Largest change of brightness, contrast, saturation and hue, either way.",
    )
