"""python -m kvkeep: the command `kvkeep`, which lies in this package."""

import os
import sys
from pathlib import Path


def main():
    """Becomes the command, with this process's arguments, streams and signals; its exit status is the program's."""
    program = Path(__file__).parent / "bin" / "kvkeep"
    try:
        os.execv(program, ["kvkeep", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"kvkeep: {program} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
