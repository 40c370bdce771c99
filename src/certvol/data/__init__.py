"""Images in: found in folders, decoded once, augmented on the device, drawn in balanced batches."""

SOURCE, TARGET = 0, 1  # the two domains
