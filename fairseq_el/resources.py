"""Where the files that come with the package lie: presets and the demo model."""

from pathlib import Path

USER_DIR = Path(__file__).resolve().parent
"""What `fairseq-generate --user-dir` takes, from any folder."""

TREE = USER_DIR.parent


def resource(name: str) -> Path:
    """The folder `configs` or `demo`: package data of an installed package, beside it in a source tree."""
    installed = USER_DIR / name
    return installed if installed.is_dir() else TREE / name
