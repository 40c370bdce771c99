"""Find images in folders, decode them once, augment them on the device and plan batches."""

import os

import numpy as np
from numpy.typing import NDArray

SOURCE, TARGET = 0, 1  # the two domains
Place = str | os.PathLike[str]
"""The path of a folder or file."""
Indices = NDArray[np.int64]
"""Numbers of images, rows or classes."""
Features = NDArray[np.float32]
"""Rows x views x D."""
