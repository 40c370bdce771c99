"""Find images in folders, decode them once, augment them on the device and plan batches."""

SOURCE, TARGET = 0, 1  # the two domains
