"""C++ kernels: compiled at first use, checked when loaded, with torch as the fallback."""
