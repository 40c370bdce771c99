"""`python -m certvol` and the command `certvol`."""

import sys


def main() -> None:
    from certvol.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
