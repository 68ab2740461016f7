# SPDX-License-Identifier: Apache-2.0
"""A policy over the cache of llama-cpp-python's `Llama`, which is not touched.

    llama = kvkeep.llama_cpp.Llama("tova,budget=1024,share=union", model_path="model.gguf", n_ctx=8192)
    llama("Once upon a time", max_tokens=100)
    kvkeep.llama_cpp.events(llama)  # how often its sequences were cut

It loads libkvkeep_llama_preload.so, which must have been compiled with the llama.h of this llama-cpp-python
(docs/reference/llama.md#any-program), and calls llama.cpp through it. Linux only.
"""

import ctypes
import os

from ._kvkeep import StateError, Unsupported

_LIBRARY = "libkvkeep_llama_preload.so"
_loaded = None


def _load():
    """The library, before the llama.cpp of llama_cpp: whatever of llama.cpp it has stands there in its place."""
    global _loaded
    if _loaded is not None:
        return _loaded
    import llama_cpp
    import llama_cpp.llama_cpp as functions

    path = os.environ.get("KVKEEP_LLAMA_LIBRARY", _LIBRARY)
    ctypes.CDLL(functions._lib._name, mode=ctypes.RTLD_GLOBAL)  # its symbols are what the library lacks
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise Unsupported(
            f"kvkeep.llama_cpp: {path} cannot be loaded ({error}); allowed {_LIBRARY} where the loader finds it, or "
            "its path in KVKEEP_LLAMA_LIBRARY"
        ) from error
    library.kvkeep_llama_policy.argtypes = [ctypes.c_char_p]
    library.kvkeep_llama_said.restype = ctypes.c_char_p
    library.kvkeep_llama_events.argtypes = [ctypes.c_void_p]
    library.kvkeep_llama_events.restype = ctypes.c_int64
    if library.kvkeep_llama_bind(os.fsencode(functions._lib._name)) != 0:
        raise Unsupported(_said(library))
    library.kvkeep_llama_policy(b"")
    own = ctypes.CDLL(functions._lib._name)
    for name in dir(functions):
        before = getattr(functions, name)
        if not name.startswith("llama_") or not hasattr(before, "argtypes"):
            continue
        try:
            ours = getattr(library, name)
        except AttributeError:
            continue
        if ctypes.cast(ours, ctypes.c_void_p).value == ctypes.cast(getattr(own, name), ctypes.c_void_p).value:
            continue  # llama.cpp's own, which the library only uses
        ours.argtypes, ours.restype = before.argtypes, before.restype
        for module in (functions, llama_cpp):
            setattr(module, name, ours)
    _loaded = library
    return library


def _said(library):
    return library.kvkeep_llama_said().decode(errors="replace")


def Llama(policy, *args, **kwargs):  # noqa: N802 (it makes a llama_cpp.Llama)
    """A llama_cpp.Llama of these arguments whose context is kept by `policy`, as in kvkeep.policies().

    Raises kvkeep.Unsupported, with the reason, where the policy does not exist or cannot run over the model or its
    cache, and for a library that is missing or was compiled for another llama.cpp; whatever llama_cpp.Llama raises.
    Chunks of a prompt, of n_batch tokens, end as prompts do: with n_batch as long as the prompt it is cut once, as a
    whole. Texts that begin as the one before do go back to there unless an event has cut it; else all is computed anew.
    """
    import llama_cpp

    library = _load()
    library.kvkeep_llama_policy(policy.encode())
    try:
        made = llama_cpp.Llama(*args, **kwargs)
    except ValueError as error:
        if "context" in str(error):
            raise Unsupported(_said(library)) from error
        raise
    finally:
        library.kvkeep_llama_policy(b"")
    if library.kvkeep_llama_events(made.ctx) < 0:
        made.close()
        raise Unsupported(_said(library))
    return made


def events(llama):
    """How often a sequence of this Llama was cut. Raises kvkeep.StateError for one that no policy keeps (any more)."""
    count = _load().kvkeep_llama_events(llama.ctx)
    if count < 0:
        raise StateError("kvkeep.llama_cpp: no policy keeps this Llama; allowed what kvkeep.llama_cpp.Llama() made")
    return count
