"""Finds the files that come with the package: presets and the demo model."""

from pathlib import Path

USER_DIR = Path(__file__).resolve().parent
"""The folder of the package, which `fairseq-generate --user-dir` takes from any folder."""

TREE = USER_DIR.parent
"""The folder that has the package: a source tree, or site-packages."""


def resource(name: str) -> Path:
    """The folder `configs` or `demo`: package data of an installed package, beside the package in a source tree."""
    installed = USER_DIR / name
    return installed if installed.is_dir() else TREE / name
