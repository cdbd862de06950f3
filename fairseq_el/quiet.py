"""Silences what fairseq's commands print about their own libraries and no user can act on."""

import logging
import warnings


def silence_library_notices() -> None:
    """hydra's deprecations (fairseq was written for hydra 1.0), its debug lines, and memory pinning on
    machines without an accelerator."""
    warnings.filterwarnings("ignore", module=r"hydra(\.|$)")
    for begins in (
        r"\s*The version_base parameter is not specified",
        r"\s*'config' is validated against ConfigStore schema",
        r"\s*The strict flag in the compose API is deprecated",
        r"hydra\.experimental\.\w+\(\) is no longer experimental",
        r"'pin_memory' argument is set as true but no accelerator is found",
        r"`torch\.jit\.script` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=begins)
    logging.getLogger("hydra").setLevel(logging.WARNING)
