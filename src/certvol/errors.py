"""The errors a user sees: one sentence each, told apart by exit code."""


class CertvolError(Exception):
    """Base of all: its text is shown to the user without a traceback."""

    exit_code = 1


class UserError(CertvolError):
    """Something the user can mend: a path, a setting, a file. The text says what was found, what was expected and what to do."""

    exit_code = 2


class RunFailed(CertvolError):
    """A run that could not go on: the reason in one sentence, the last good state kept."""

    exit_code = 1


class Interrupted(BaseException):
    """Stopped from outside (Ctrl-C, SIGTERM), with everything saved. It may come at any line, and so is no Exception: one that
    mends what a file or library does wrong would take it for that."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
