# SPDX-License-Identifier: Apache-2.0
"""Keepers whose cache and queries are on an NVIDIA GPU.

    keeper = kvkeep.Keeper(spec, "ams-tova,budget=1024", accelerator=kvkeep.cuda.accelerator(0))

Arrays are those of torch, CuPy or anything else that speaks DLPack, on that GPU; lengths and block table stay on the
CPU. Kernels run on the stream that is current when a method is called, behind whatever is on it, and the caller does
not wait for them: but in step() under policies whose scores decide how many slots stay, and in positions(), save() and
narrow(). docs/inside/cuda.md says what runs on a GPU, and in which order.
"""

import sys
from functools import partial

from . import InvalidArgument, Unsupported

try:
    from . import _kvkeep_cuda
except ImportError as error:
    _kvkeep_cuda, _why_not = None, error

__all__ = ["accelerator", "has_kernels"]


def has_kernels():
    """This package was built with nvcc, so that accelerator() works where there is a GPU."""
    return _kvkeep_cuda is not None


def _framework():
    """The module whose arrays are on GPUs here: torch, cupy, or None."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        return torch
    return cupy


def accelerator(index=0, stream=None, allocator=None):
    """For one Keeper whose cache and queries are on GPU `index`.

    stream: where its work goes: a cudaStream_t as int (torch.cuda.Stream.cuda_stream, cupy.cuda.Stream.ptr), or a
    callable that returns one; None: the current stream of torch, if it has been imported and has CUDA, else of CuPy,
    else the default stream. allocator: (allocate(bytes, stream) -> address, free(address, bytes, stream)), memory that
    is used in the order of the stream; None: torch's caching allocator, else a pool of its own by cudaMallocAsync.
    Raises DeviceError if there is no such GPU, or one older than compute capability 8.0, and Unsupported where this
    package has no kernels.
    """
    if _kvkeep_cuda is None:
        raise Unsupported(
            f"kvkeep.cuda: this package has no kernels ({_why_not}); allowed one that was built where nvcc is: "
            "pip install . in a checkout"
        )
    if isinstance(index, bool) or not isinstance(index, int):
        raise InvalidArgument(f"kvkeep.cuda: index is {index!r}; allowed the number of a GPU, from 0 on")
    framework = _framework()
    if stream is None and framework is not None:
        stream = _current_stream(framework, index)
    elif isinstance(stream, int) and not isinstance(stream, bool):
        stream = partial(int, stream)
    elif stream is not None and not callable(stream):
        raise InvalidArgument(f"kvkeep.cuda: stream is {stream!r}; allowed a cudaStream_t as int, or a callable")
    if allocator is None and framework is not None and framework.__name__ == "torch":
        allocator = _torch_allocator(framework, index)
    elif allocator is not None and not (
        isinstance(allocator, (tuple, list)) and len(allocator) == 2 and all(map(callable, allocator))
    ):
        raise InvalidArgument(
            f"kvkeep.cuda: allocator is {allocator!r}; allowed (allocate(bytes, stream), free(address, bytes, stream))"
        )
    return _kvkeep_cuda.accelerator(index, stream, *(allocator or (None, None)))


def _current_stream(framework, index):
    if framework.__name__ == "torch":
        return lambda: framework.cuda.current_stream(index).cuda_stream
    return lambda: framework.cuda.get_current_stream(index).ptr


def _torch_allocator(torch, index):
    def allocate(bytes, stream):
        return torch.cuda.caching_allocator_alloc(bytes, index, stream)

    def free(address, bytes, stream):
        torch.cuda.caching_allocator_delete(address)

    return allocate, free
