# SPDX-License-Identifier: Apache-2.0
"""Decides which entries of an LLM's key-value cache stay, and moves them.

    spec = kvkeep.ModelSpec(query_heads=32, kv_heads=8, key_dim=128, num_layers=32, inv_freq=inv_freq)
    keeper = kvkeep.Keeper(spec, "ams-tova,budget=1024")
    keeper.join(id)
    keeper.observe(layer, [id], [0, 1], queries)  # in every layer of a step: torch, NumPy or any DLPack array
    keeper.step(layers, [id], lengths)            # once, after the last layer: writes the new lengths

For models of Hugging Face: kvkeep.hf.attach(model, "ams-tova,budget=1024").
"""

from pathlib import Path as _Path

from ._kvkeep import (
    OPEN_PROMPT,
    Cut,
    DeviceError,
    InvalidArgument,
    Keeper,
    LayerReport,
    ModelSpec,
    Narrowing,
    PageAllocator,
    PageMove,
    PagePool,
    Report,
    Rope,
    StateError,
    ThreadPool,
    Totals,
    Unscored,
    Unsupported,
    __version__,
    load_plugin,
    loaded_plugins,
    policies,
    prometheus_metrics,
)
from ._plugins import load_installed as _load_installed


def cmake_dir():
    """Folder for CMAKE_PREFIX_PATH: find_package(kvkeep) then finds the library and headers of this package."""
    return str(_Path(__file__).parent)


__all__ = [name for name in dir() if not name.startswith("_")] + ["__version__"]

_load_installed()
