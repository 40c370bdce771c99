"""`python -m certvol` and the command `certvol`."""

import io
import os
import signal
import sys

from certvol.cli._process import stop_at_once

STOPPING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    for number in STOPPING:
        signal.signal(number, stop_at_once)
    from certvol.cli._main import run  # slow: a signal may come meanwhile

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack some letters
    code = run(sys.argv[1:])
    for number in STOPPING:  # the command has ended: nothing is left to stop
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Under torchrun, threads of torch may abort a process that exits the usual way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
