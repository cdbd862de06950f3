"""Stage 6: from a training checkpoint to a small one that stock fairseq loads.

Usage: export.py CHECKPOINT OUT. Keeps the weights, in half precision, and the options; drops the
optimiser's state and names the architecture bart_base, which it is once it is trained.
"""

import argparse
import sys

import torch

# Options that say where training happened; fairseq's defaults instead.
NEUTRAL = {
    "user_dir": None,
    "save_dir": "checkpoints",
    "finetune_from_model": None,
    "data": "demo",
    "arch": "bart_base",
}


def neutralise(options: dict) -> None:
    options.update({name: value for name, value in NEUTRAL.items() if name in options})


def halve(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Half-precision weights, tied ones still one tensor, so that they are saved once."""
    halves: dict[int, torch.Tensor] = {}
    return {
        name: halves.setdefault(tensor.data_ptr(), tensor.half())
        for name, tensor in weights.items()
    }


def main(checkpoint: str, out: str) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model_options = vars(state["cfg"]["model"])
    neutralise(model_options)
    model_options["_name"] = NEUTRAL["arch"]
    for section in ("common", "checkpoint", "task"):
        neutralise(state["cfg"][section])
    state["model"] = halve(state["model"])
    state["last_optimizer_state"] = None
    state["criterion"] = None
    epoch = state["extra_state"]["train_iterator"]["epoch"]
    state["extra_state"] = {"train_iterator": {"epoch": epoch}}
    torch.save(state, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
