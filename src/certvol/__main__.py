"""`python -m certvol` and the command `certvol`."""

import os
import sys


def run(words: list[str]) -> int:
    """One command in this process; its exit code."""
    from certvol.cli import run as run_command  # not before `main` has opened the streams

    return run_command(words)


def main() -> None:
    from certvol.streams import escape_the_unprintable, open_closed_streams

    open_closed_streams()
    escape_the_unprintable()
    code = run(sys.argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's threads of a team may abort a process that ends the usual way; all files are written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
