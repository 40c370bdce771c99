"""Read the findings of a check."""

from certvol.data.check import CheckReport, Finding
from certvol.settings import DataConfig

CONFIG = DataConfig(workers=2, cache_dir="/nonexistent/never-written")


def texts(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]


def unexpected(report: CheckReport) -> list[Finding]:
    """Return all findings but the one about the few images of a test's target."""
    return [each for each in report.findings if "too few to adapt" not in each.text]
