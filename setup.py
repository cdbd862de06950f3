"""What pyproject.toml can't say: package data from outside the package's folder, compiled kernels, and how an editable
install works."""

import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path

from setuptools import Command, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
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


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]


class BuildKernels(Command):
    """Compiles the variants of the C++ kernels into the package; into the source tree for an editable install.

    Without a compiler installation works too: the kernels are then compiled at first use, or torch takes their place.
    FAIRSEQ_EL_KERNELS=off leaves them out.
    """

    editable_mode = False
    build_lib: str

    def initialize_options(self):
        self.build_lib = ""

    def finalize_options(self):
        self.build_lib = self.build_lib or self.get_finalized_command("build_py").build_lib

    @property
    def folder(self) -> Path:
        return (TREE if self.editable_mode else Path(self.build_lib)) / "fairseq_el" / "kernels" / "prebuilt"

    def run(self):
        if os.environ.get("FAIRSEQ_EL_KERNELS") == "off":
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        file = TREE / "fairseq_el" / "kernels" / "compiler.py"  # by its file: importing the package needs fairseq
        spec = importlib.util.spec_from_file_location("compiler", file)
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        for problem in compiler.prebuild(self.folder):
            self.warn(f"the C++ kernels were not all compiled ({problem}): the others are compiled at first use")

    def get_outputs(self):
        return [] if self.editable_mode else [str(file) for file in self.folder.glob("*.so")]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


class BDistWheel(bdist_wheel):
    """For this platform, but for any Python, if there are compiled kernels in it."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        if self.get_finalized_command("build_kernels").get_outputs():
            platform = re.sub("[-.]", "_", sysconfig.get_platform())
        return python, abi, platform


setup(
    packages=[*find_packages(include=["fairseq_el", "fairseq_el.*"]), "fairseq_el.configs", "fairseq_el.demo"],
    package_dir={"fairseq_el.configs": "configs", "fairseq_el.demo": "demo"},
    package_data={
        "fairseq_el": ["py.typed", "kernels/cpp/*", "cli/evaluate/*.html", "serve/page.html"],
        "fairseq_el.configs": ["*.yaml"],
        "fairseq_el.demo": ["README.md", "dict.txt", "model.pt", "sentencepiece.model", "test.*"],
    },
    include_package_data=False,  # else all that MANIFEST.in lists under demo/, such as the recipe
    cmdclass={
        "build": Build,
        "build_kernels": BuildKernels,
        "bdist_wheel": BDistWheel,
        "editable_wheel": EditableWheel,
    },
)
