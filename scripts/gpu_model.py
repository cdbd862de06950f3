#!/usr/bin/env python3
"""Predicts the paper's GPU figures from counted kernels, for about ten minutes, and writes docs/gpu.md. Needs no GPU.

scripts/gpu_model.py            counts, predicts and writes
scripts/gpu_model.py --report   the page again, from docs/results/gpu-model.json
"""

import argparse
import json
import logging

from bench.environment import ROOT
from bench.report import replace_section

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "docs" / "results" / "gpu-model.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="count nothing")
    args = parser.parse_args()
    from gpu import report  # which loads torch and fairseq

    if not args.report:
        from bench.tasks import paper_tasks
        from gpu import model

        logging.getLogger("fairseq").setLevel(logging.WARNING)
        RESULTS.write_text(json.dumps(model.predict(paper_tasks()), indent=1) + "\n")
    replace_section(PAGE, "gpu-model", report.render(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
