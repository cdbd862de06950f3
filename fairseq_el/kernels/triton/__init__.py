"""Triton kernels for CUDA. `kernels.py` needs Triton; `launch.py` decides their tile sizes and calls them."""
