"""Arrays that end where their memory ends: an access beyond them stops the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(values: NDArray[Any]) -> NDArray[Any]:
    """A copy of ``values`` whose last byte is followed by a page that may not be touched."""
    nbytes = values.nbytes
    pages = max(1, -(-nbytes // mmap.PAGESIZE))
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _LIBC.mprotect(address + pages * mmap.PAGESIZE, mmap.PAGESIZE, _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = pages * mmap.PAGESIZE - nbytes
    copy = np.frombuffer(memory, values.dtype, values.size, start).reshape(values.shape)
    copy[...] = values
    return copy


def guarded_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Poisoned memory of this shape with nothing after it."""
    poison = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8)
    return guarded(poison.view(dtype).reshape(shape))
