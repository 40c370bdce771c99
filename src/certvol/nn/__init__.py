"""Build networks: backbones, BatchNorm per domain, the two heads and their sampling."""
