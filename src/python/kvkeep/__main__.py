# SPDX-License-Identifier: Apache-2.0
"""python -m kvkeep: the command `kvkeep`, which lies in this package."""

import os
import sys
from pathlib import Path

from ._kvkeep import loaded_plugins


def main():
    """Becomes the command, with this process's arguments, streams, signals and the plug-ins that installed packages
    bring; its exit status is the program's."""
    program = Path(__file__).parent / "bin" / "kvkeep"
    plugins = [*map(str, loaded_plugins()), *filter(None, [os.environ.get("KVKEEP_PLUGINS")])]
    environment = {**os.environ, "KVKEEP_PLUGINS": ":".join(plugins)}
    try:
        os.execve(program, ["kvkeep", *sys.argv[1:]], environment)
    except OSError as error:
        sys.exit(f"kvkeep: {program} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
