"""No adaptation: training on the source alone, the figure that every method has to beat."""

from certvol.methods import basic


class Method(basic.Method):
    summary = "no adaptation: cross-entropy on the source alone"
    adapts = False
