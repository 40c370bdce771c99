"""`python -m certvol` and the command `certvol`."""

import io
import os
import sys

from certvol.cli._main import run


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack some letters
    code = run(sys.argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Under torchrun, threads of torch may abort a process that exits the usual way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
