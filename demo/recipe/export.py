"""Stages 5 and 7: from the last checkpoints of training to a small one that stock fairseq loads.

Usage: export.py OUT CHECKPOINT... Averages the weights, in half precision, and keeps the options; drops the
optimiser's state and history and names the architecture bart_base, which it is once it is trained.
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


def average(models: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Half-precision means, tied weights still one tensor, so that they are saved once."""
    means: dict[int, torch.Tensor] = {}
    for name, tensor in models[0].items():
        if tensor.data_ptr() not in means:
            mean = torch.stack([model[name].double() for model in models]).mean(dim=0)
            means[tensor.data_ptr()] = mean.half()
    return {name: means[tensor.data_ptr()] for name, tensor in models[0].items()}


def load(checkpoint: str) -> dict:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(checkpoint, map_location="cpu", weights_only=True)


def main(out: str, *checkpoints: str) -> None:
    states = [load(checkpoint) for checkpoint in checkpoints]
    state = states[-1]
    model_options = vars(state["cfg"]["model"])
    neutralise(model_options)
    model_options["_name"] = NEUTRAL["arch"]
    for section in ("common", "checkpoint", "task"):
        neutralise(state["cfg"][section])
    state["model"] = average([saved["model"] for saved in states])
    state["last_optimizer_state"] = None
    state["optimizer_history"] = [state["optimizer_history"][-1] | {"lr_scheduler_state": {}}]
    state["criterion"] = None
    epoch = state["extra_state"]["train_iterator"]["epoch"]
    state["extra_state"] = {"train_iterator": {"epoch": epoch}}
    torch.save(state, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
