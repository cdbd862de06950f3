"""The numbers of the paper, for pages to put beside measured ones. Its GPU is a V100 with 16 GB."""

# Table 2: samples per second, multi-head attention and EL, by task and search, in single and in half precision.
TABLE2: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("squad", "beam"): {"fp32": (86.6, 173.6), "fp16": (170.9, 458.1)},
    ("xsum", "beam"): {"fp32": (6.8, 26.3), "fp16": (14.7, 69.4)},
    ("cnndm", "beam"): {"fp32": (3.4, 12.2), "fp16": (5.7, 28.6)},
    ("gpt2-small", "beam"): {"fp32": (1.5, 2.5), "fp16": (2.1, 3.8)},
    ("gpt2-medium", "beam"): {"fp32": (0.6, 1.1), "fp16": (0.9, 2.0)},
    ("squad", "diverse"): {"fp32": (82.1, 171.8), "fp16": (162.3, 454.1)},
    ("xsum", "diverse"): {"fp32": (7.2, 27.5), "fp16": (15.8, 71.9)},
    ("cnndm", "diverse"): {"fp32": (3.2, 12.0), "fp16": (5.4, 28.5)},
    ("squad", "greedy"): {"fp32": (190.3, 260.3), "fp16": (436.4, 699.7)},
    ("xsum", "greedy"): {"fp32": (15.0, 44.9), "fp16": (42.6, 107.8)},
    ("cnndm", "greedy"): {"fp32": (7.0, 19.5), "fp16": (13.0, 40.0)},
    ("gpt2-small", "greedy"): {"fp32": (9.0, 13.6), "fp16": (14.7, 26.2)},
    ("gpt2-medium", "greedy"): {"fp32": (3.6, 5.9), "fp16": (5.9, 10.4)},
}

# Table 3: samples per second of BART-large on CNN/DailyMail in half precision, by batch; None did not fit.
TABLE3: dict[int, dict[str, float | None]] = {
    32: {"no-cache": 1.9, "copied": 5.7, "always": 8.0},
    64: {"no-cache": 1.9, "copied": None, "always": 12.6},
    128: {"no-cache": None, "copied": None, "always": 21.3},
    320: {"no-cache": None, "copied": None, "always": 28.6},
}

# Table 4: (multi-head, EL) in GB by (batch, n): BART-large in half precision, a cache for every beam.
TABLE4 = {
    (32, 256): ("1.5", "0.02"),
    (32, 1024): ("6", "0.06"),
    (64, 256): ("3", "0.03"),
    (64, 1024): ("12", "0.13"),
    (320, 256): ("15", "0.15"),
    (320, 1024): ("60", "0.63"),
}

# Table 5: ROUGE-1, ROUGE-2 and ROUGE-L of BART-large on CNN/DailyMail.
TABLE5 = {
    "stock": (44.21, 21.20, 41.03),
    "el-fp32": (44.21, 21.20, 41.03),
    "stock-fp16": (44.22, 21.20, 41.04),
    "el": (44.22, 21.21, 41.05),
}

# Figure 3, from the paper's text, in half precision.
FIGURE3_GFLOP = {"build copied": "more than 500"}
FIGURE3_GB = {"attend copied": "about 0.5", "attend el": "0.15"}
V100_BALANCE = (10, 100)  # FLOP per byte, single and half precision

# Figure 4, from the paper's text: EL against multi-head attention with a cache, at both ends.
FIGURE4 = {("n", 64): 1.4, ("n", 1024): 5.0, ("beam", 1): 2.0, ("beam", 8): 5.0}
