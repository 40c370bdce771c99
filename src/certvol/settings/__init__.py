"""Settings: declared in `sections` and by methods, grouped in `presets`, loaded by `resolve`."""

from certvol.settings.data_sections import MIN_IMAGE_SIZE, AugmentConfig, DataConfig
from certvol.settings.declare import Range, Setting, setting, settings_of
from certvol.settings.presets import PRESETS
from certvol.settings.resolve import (
    Config,
    absolute_path,
    flatten,
    for_method,
    list_settings,
    nearest,
    read_settings_file,
    resolve,
    shown,
)
from certvol.settings.sections import (
    SECTIONS,
    WITHOUT_EFFECT,
    GuardConfig,
    ModelConfig,
    NormMode,
    TrainingConfig,
)

__all__ = [
    "MIN_IMAGE_SIZE",
    "PRESETS",
    "SECTIONS",
    "WITHOUT_EFFECT",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "GuardConfig",
    "ModelConfig",
    "NormMode",
    "Range",
    "Setting",
    "TrainingConfig",
    "absolute_path",
    "flatten",
    "for_method",
    "list_settings",
    "nearest",
    "read_settings_file",
    "resolve",
    "setting",
    "settings_of",
    "shown",
]
