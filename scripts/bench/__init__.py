"""The benchmark: workers that run one system each, a driver that interleaves them, and reports."""
