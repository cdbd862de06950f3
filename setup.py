"""What pyproject.toml can't say: package data from outside the package's folder, and how an editable install works."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

TREE = Path(__file__).resolve().parent
EDITABLE = f'''"""Editable install: the package is in a source tree, and replaces this module in sys.modules."""

import importlib.util
import sys

spec = importlib.util.spec_from_file_location(__name__, {str(TREE / "fairseq_el" / "__init__.py")!r})
sys.modules[__name__] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
'''


class PackageFolder:
    """Makes an editable install a folder in site-packages, with one file that loads the package from the source tree.

    `fairseq-generate --user-dir fairseq_el` looks for a folder of that name, in the current folder and then beside
    fairseq. The import hooks and .pth files that setuptools would install have no such folder.
    """

    def __call__(self, wheel, files, mapping):
        wheel.writestr("fairseq_el/__init__.py", EDITABLE)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class EditableWheel(editable_wheel):
    def _select_strategy(self, name, tag, build_lib):
        return PackageFolder()


setup(
    packages=[*find_packages(include=["fairseq_el", "fairseq_el.*"]), "fairseq_el.configs", "fairseq_el.demo"],
    package_dir={"fairseq_el.configs": "configs", "fairseq_el.demo": "demo"},
    package_data={
        "fairseq_el": ["py.typed", "kernels/cpp/*"],
        "fairseq_el.configs": ["*.yaml"],
        "fairseq_el.demo": ["README.md", "dict.txt", "model.pt", "sentencepiece.model", "test.*"],
    },
    include_package_data=False,  # else all that MANIFEST.in lists under demo/, such as the recipe
    cmdclass={"editable_wheel": EditableWheel},
)
