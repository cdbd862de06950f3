"""Triton's kernels are run by its interpreter, which it decides when it is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
