"""Networks: backbones, their normalisation, the two heads, sampling."""
