"""Learning rate and number of steps of the two phases."""

from certvol.config import TrainingConfig
from certvol.methods.protocol import AdaptationMethod


def pretraining_rate(config: TrainingConfig) -> float:
    return config.learning_rate


def adaptation_rate(config: TrainingConfig, progress: float) -> float:
    """`progress` of the adaptation phase, 0 to 1."""
    start = config.learning_rate if config.adapt_learning_rate is None else config.adapt_learning_rate
    if config.schedule == "constant":
        return start
    return start / float((1 + 10 * progress) ** config.schedule_exponent)


def steps_per_cycle(config: TrainingConfig, num_classes: int) -> int:
    """0 stands for the authors' rule: five steps for every sixteen classes begun."""
    return config.cycle_steps if config.cycle_steps > 0 else 5 * -(-num_classes // 16)


def steps_of_run(config: TrainingConfig, method: AdaptationMethod) -> int:
    """Of both phases; trials of normalisation modes are not counted."""
    stages = method.stages if method.adapts and not method.closed_form else 0
    return config.pretrain_steps + stages * config.cycles * steps_per_cycle(config, method.network.num_classes)


def stage_of(cycle: int, cycles: int) -> tuple[int, int, int]:
    """(number, first cycle, cycle after the last) of the stage that `cycle` belongs to; each has `cycles` of them."""
    number = cycle // cycles
    return number, number * cycles, (number + 1) * cycles
