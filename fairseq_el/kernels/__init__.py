"""C++ kernels: compiled at set-up or at first use, checked when loaded, with torch as the fallback."""
