"""The errors a user sees: one sentence each, with the command's exit code."""


class CertvolError(Exception):
    """Base of the errors whose text is shown without a traceback."""

    exit_code = 1


class UserError(CertvolError):
    """A mistake in a path, a setting or a file. The text says what is wrong and what to do."""

    exit_code = 2


class RunFailed(CertvolError):
    """A run cannot continue. The text says why; the last good state is kept."""


class Interrupted(BaseException):
    """The run was stopped from outside (Ctrl-C, SIGTERM) with everything saved.

    It may be raised at any line. It is not an Exception, so that code that handles errors
    of files or libraries does not catch it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch could not get enough of the computer's memory."""
    return "allocate" in str(error)  # torch has no class for it, other than for the GPU's


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, for a message of one sentence."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
