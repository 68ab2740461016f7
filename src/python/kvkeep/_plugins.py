# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that installed packages bring: entry points of the group "kvkeep.plugins"."""

import warnings
from importlib.metadata import entry_points

from ._kvkeep import load_plugin

GROUP = "kvkeep.plugins"


def _entries():
    try:
        return list(entry_points(group=GROUP))
    except TypeError:  # Python 3.9
        return entry_points().get(GROUP, [])


def load_installed():
    """Loads what each entry point names: the path of a library, or a function that returns one or loads by itself. One
    that fails is left out with a warning: who asks for its policies is told that there are none of these names."""
    for entry in _entries():
        try:
            found = entry.load()
            if callable(found):
                found = found()
            if found is not None:
                load_plugin(found)
        except Exception as error:  # whatever a package does at its import
            warnings.warn(
                f"kvkeep: the plug-in {entry.name} = {entry.value} is left out: {error}", RuntimeWarning, stacklevel=3
            )
