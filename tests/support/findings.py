"""Read the findings of a check."""

from certvol.data.check import CheckReport
from certvol.settings import DataConfig

CONFIG = DataConfig(workers=2, cache_dir="/nonexistent/never-written")


def texts(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]
