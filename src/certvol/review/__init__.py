"""Label target images on a local page: which images, what their labels say, and the server."""
