"""No adaptation: train on the source alone. Every method should beat this figure."""

from certvol.methods import basic


class Method(basic.Method):
    summary = "no adaptation: cross-entropy on the source alone"
    adapts = False
