"""Run one command; turn errors and signals into a sentence and an exit code."""

import errno
import sys
from collections.abc import Sequence

from certvol.cli import discover
from certvol.cli._options import read
from certvol.cli._process import QuietStderr, discard, process_rank
from certvol.errors import CertvolError, Interrupted

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
STREAM_FAULTS = (*NO_SPACE, errno.EFBIG, errno.EIO)


def run(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, 1 a run failed, 2 a user's mistake, 130 Ctrl-C, 143 SIGTERM."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except (CertvolError, Interrupted) as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader has enough, as in `certvol list settings | head`
        discard(sys.stdout)
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in STREAM_FAULTS:
            raise
        reason = "no space left" if error.errno in NO_SPACE else (error.strerror or "").lower()
        if error.filename is None:
            discard(sys.stdout)
            return _fail(f"cannot write to stdout: {reason}. Files already written are complete", 2)
        hint = "then resume a run with `certvol adapt --resume`, or repeat the benchmark's command"
        return _fail(f"{reason}: {error.filename}; fix that, {hint}", 2)


def _run(arguments: Sequence[str]) -> int:
    commands = discover()
    options = read(arguments, commands)
    if options is None:
        return 0
    from certvol.cli._console import ConsoleReporter

    reporter = ConsoleReporter()
    try:
        return int(commands[options.command].run(options, reporter))
    finally:
        reporter.close()


def _fail(message: str, code: int) -> int:
    where = f" (process {process_rank()})" if process_rank() > 0 else ""
    QuietStderr().write(f"certvol{where}: {message}\n")
    return code
