"""Images: found in folders, decoded once, warped on the device, drawn in balanced batches."""
