"""The browser that the tests of the report use too."""

from report.conftest import browser as browser
from report.conftest import screenshots as screenshots
