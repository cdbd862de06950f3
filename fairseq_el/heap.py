"""The heap of the C library."""

import ctypes


def trim() -> None:
    """Gives freed memory back to the system: glibc keeps the gaps between live blocks."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such function
    if malloc_trim is not None:
        malloc_trim(0)
