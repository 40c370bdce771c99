"""Settings: declared in `sections` and by methods, grouped in `presets`, loaded by `resolve`."""

from certvol.settings.data_sections import MIN_IMAGE_SIZE as MIN_IMAGE_SIZE
from certvol.settings.data_sections import AugmentConfig as AugmentConfig
from certvol.settings.data_sections import DataConfig as DataConfig
from certvol.settings.declare import Range as Range
from certvol.settings.declare import Setting as Setting
from certvol.settings.declare import setting as setting
from certvol.settings.declare import settings_of as settings_of
from certvol.settings.presets import PRESETS as PRESETS
from certvol.settings.resolve import Config as Config
from certvol.settings.resolve import absolute_path as absolute_path
from certvol.settings.resolve import flatten as flatten
from certvol.settings.resolve import for_method as for_method
from certvol.settings.resolve import list_settings as list_settings
from certvol.settings.resolve import nearest as nearest
from certvol.settings.resolve import read_settings_file as read_settings_file
from certvol.settings.resolve import resolve as resolve
from certvol.settings.resolve import shown as shown
from certvol.settings.sections import SECTIONS as SECTIONS
from certvol.settings.sections import WITHOUT_EFFECT as WITHOUT_EFFECT
from certvol.settings.sections import GuardConfig as GuardConfig
from certvol.settings.sections import ModelConfig as ModelConfig
from certvol.settings.sections import NormMode as NormMode
from certvol.settings.sections import TrainingConfig as TrainingConfig
