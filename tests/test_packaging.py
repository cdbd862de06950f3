"""The package installs as a wheel and as an editable install, works from any folder, and declares what it needs."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import fairseq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fairseq_el
from fairseq_el.kernels import build, compiler
from fairseq_el.lazy_import import INSTALL_FAIRSEQ
from helpers import DEMO, ROOT, TEXTS, run_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SITE_PACKAGES = Path(fairseq.__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


# ---- building


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the source tree: building leaves files in it."""
    left_out = shutil.ignore_patterns(".*", "build", "dist", "results", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", ignore=left_out))


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    done = run_command(sys.executable, "-c", code, cwd=tree)
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(folder / f"fairseq_el-{fairseq_el.__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"fairseq_el-{fairseq_el.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, folder: Path, **settings: str) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source, **settings)
    return next(folder.glob("*.whl"))


def pip(*words, **settings: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = run_command(*command, cwd="/", env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- what is in the wheel and in the source distribution


def files_below(folder: Path) -> set[str]:
    """Without what is compiled."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so"))
    return {str(path.relative_to(folder)) for path in found}


def test_the_wheel_has_the_package_with_presets_and_demo_and_nothing_else(tree, wheel):
    expected = {f"fairseq_el/{name}" for name in files_below(tree / "fairseq_el")}
    expected |= {f"fairseq_el/configs/{name}" for name in files_below(tree / "configs")}
    expected |= {f"fairseq_el/demo/{path.name}" for path in (tree / "demo").iterdir() if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
    assert found == expected
    assert {"fairseq_el/py.typed", "fairseq_el/demo/model.pt", "fairseq_el/configs/xsum.yaml"} < found
    assert any(name.startswith("fairseq_el/kernels/cpp/") for name in found)


def kernels_in(wheel: Path) -> list[str]:
    """The variants, without their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        found = (re.fullmatch(r"fairseq_el/kernels/prebuilt/(.*)-\w+\.so", name) for name in archive.namelist())
        return sorted(match[1] for match in found if match)


@pytest.mark.skipif(build.library() is None, reason="the kernels were not compiled")
def test_the_wheel_has_the_kernels_for_this_platform_and_any_python(wheel):
    machine = platform.machine()
    variants = compiler.VARIANTS if machine == "x86_64" else ()
    assert kernels_in(wheel) == sorted(f"kernels-{variant}" for variant in variants)
    assert wheel.stem.split("-")[2:] == ["py3", "none", f"linux_{machine}" if variants else "any"]


def test_without_a_compiler_the_wheel_is_for_any_platform(sdist, tmp_path):
    source = shutil.copytree(sdist, tmp_path / "source", ignore=shutil.ignore_patterns("build"))
    wheel = build_wheel(source, tmp_path, CXX="no-such-compiler")
    assert kernels_in(wheel) == []
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_source_distribution_has_what_its_tests_need(tree, sdist):
    for folder in ("fairseq_el", "configs", "demo", "docs", "scripts", "tests"):
        assert files_below(sdist / folder) == files_below(tree / folder)
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"):
        assert (sdist / name).is_file()


def test_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        described = archive.read(f"fairseq_el-{fairseq_el.__version__}.dist-info/METADATA").decode()
    fields = HeaderParser().parsestr(described)
    assert fields["Version"] == fairseq_el.__version__
    assert fields["Author"] == "fairseq_el contributors"
    assert fields["License-Expression"] == "MIT"
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert "Programming Language :: Python :: 3.11" in fields.get_all("Classifier")
    assert {"demo", "data", "ray", "test", "benchmark"} <= set(fields.get_all("Provides-Extra"))
    assert f"## {fairseq_el.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {fairseq_el.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# ---- installed, from another folder


class Installed:
    """An environment in which the package is installed beside fairseq. Other libraries are those of this one."""

    def __init__(self, folder: Path, *what):
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        site_packages = next(folder.glob("lib/python*/site-packages"))
        # A path in a .pth file comes last, and .pth files in it are ignored: no editable install of this project.
        (site_packages / "libraries.pth").write_text(f"{SITE_PACKAGES}\n")
        for package in ("fairseq", "fairseq_cli"):
            shutil.copytree(SITE_PACKAGES / package, site_packages / package, ignore=shutil.ignore_patterns("examples"))
        script = Path(sys.executable).with_name("fairseq-generate").read_text(encoding="utf-8")
        (self.bin / "fairseq-generate").write_text(f"#!{self.bin / 'python'}\n{script.split(chr(10), 1)[1]}")
        (self.bin / "fairseq-generate").chmod(0o755)
        pip("--python", self.bin / "python", "install", "--no-deps", "--no-build-isolation", "--no-index", *what)

    def run(self, command: str | list[str], cwd: Path) -> subprocess.CompletedProcess:
        """As a user types it, in a folder that has nothing to do with the project."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        if isinstance(command, list):
            command = shlex.join(map(str, command))
        done = run_command("bash", "-c", command, cwd=cwd, env=environment)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
        return done


@pytest.fixture(scope="module")
def from_wheel(wheel, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("from_wheel"), wheel)


@pytest.fixture(scope="module")
def editable(tree, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("editable"), "-e", tree)


def hypotheses(output: str) -> dict[str, str]:
    return dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, flags=re.MULTILINE))


@pytest.mark.parametrize("way", ["from_wheel", "editable"])
def test_user_dir_takes_the_package_name_in_any_folder(way, request, tree, demo_data, stock, tmp_path):
    """Also where a folder of that name is not the package, such as a clone of this project."""
    environment = request.getfixturevalue(way)
    if way == "editable":
        (tmp_path / "fairseq_el" / "docs").mkdir(parents=True)
    search = ["--beam", 2, "--max-len-b", 20, "--batch-size", 32, "--remove-bpe", "sentencepiece"]
    command = ["fairseq-generate", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el", *search]
    done = environment.run(command, cwd=tmp_path)
    system = stock()
    expected = system.generate(beam=2, max_len_b=20)
    words = [system.task.target_dictionary.string(best["tokens"], "sentencepiece") for best, *_ in expected]
    assert hypotheses(done.stdout) == {str(n): text for n, text in enumerate(words)}
    assert re.search(r"packed \d+ linear layers", done.stderr)  # which stock fairseq doesn't do
    origin = "import importlib.util; print(importlib.util.find_spec('fairseq_el').origin)"
    file = Path(environment.run(["python", "-c", origin], cwd=tmp_path).stdout.strip())
    assert file.is_relative_to(environment.bin.parent)
    assert (str(tree / "fairseq_el" / "__init__.py") in file.read_text()) == (way == "editable")


def code_blocks() -> list[str]:
    """The README's code, fenced and indented."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)(?: {4}.*\n)+", README)
    return [*fenced, *(re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in indented)]


PYTHON_EXAMPLES = [block for block in code_blocks() if 'load("demo"' in block]
COMMANDS = [block for block in code_blocks() if re.search(r"^fairseq-el .*--model demo", block, flags=re.MULTILINE)]


def test_the_readme_has_examples():
    assert PYTHON_EXAMPLES
    assert any(re.search("^fairseq-generate .*--user-dir fairseq_el ", block) for block in code_blocks())


@pytest.mark.parametrize("code", PYTHON_EXAMPLES)
def test_the_python_example_of_the_readme_works_from_a_wheel(code, from_wheel, tmp_path):
    assert from_wheel.run(["python", "-c", code], cwd=tmp_path).stdout.strip()


@pytest.mark.parametrize("commands", COMMANDS or ["fairseq-el summarize --model demo --preset demo --input texts.txt"])
def test_the_commands_of_the_readme_work_from_a_wheel(commands, from_wheel, tmp_path):
    """Those with the demo model, in a folder that has the file of texts that they name."""
    words = shlex.split(commands)
    texts, *_ = (tmp_path / name for option, name in zip(words, words[1:]) if option == "--input")
    texts.write_text("".join(f"{text}\n" for text in TEXTS[:3]), encoding="utf-8")
    printed = from_wheel.run(commands, cwd=tmp_path).stdout.splitlines()
    summaries = [path.read_text(encoding="utf-8").splitlines() for path in tmp_path.glob("summaries*")] or [printed]
    assert all(len(found) == len(texts.read_text(encoding="utf-8").splitlines()) for found in summaries)
    assert all(summary.strip() for found in summaries for summary in found)


@pytest.mark.skipif(not build.supported_variants(), reason="this CPU takes none of the variants")
@pytest.mark.parametrize("way", ["from_wheel", "editable"])
def test_what_is_installed_needs_no_compiler(way, request, tree, tmp_path):
    environment = request.getfixturevalue(way)
    words = ["env", f"XDG_CACHE_HOME={tmp_path}", "CXX=no-such-compiler", "fairseq-el", "info", "--json"]
    kernels = json.loads(environment.run(words, cwd=tmp_path).stdout)["kernels"]
    assert kernels["variant"] == build.supported_variants()[0]
    assert Path(kernels["file"]).is_relative_to(environment.bin.parent if way == "from_wheel" else tree)


def test_the_command_knows_its_version(from_wheel, tmp_path):
    said = from_wheel.run("fairseq-el --version", cwd=tmp_path).stdout
    assert said.split() == ["fairseq_el", fairseq_el.__version__]


# ---- requirements


ENTRY = re.compile(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*")


def entries() -> dict[str, tuple[str, list[str]]]:
    """By name, each version in the lock file and its checksums."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        name, version, checksums = ENTRY.fullmatch(line).groups()
        found[canonicalize_name(name)] = (version, checksums.split())
    return found


GROUPS = {
    "package": PROJECT["project"]["dependencies"],
    **{name: PROJECT["project"]["optional-dependencies"][name] for name in ("demo", "data", "ray", "serve", "test")},
    **{name: PROJECT["dependency-groups"][name] for name in ("build", "fairseq")},
    "build-system": PROJECT["build-system"]["requires"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_lock_file_has_what_pyproject_asks_for(group):
    locked = entries()
    for requirement in map(Requirement, GROUPS[group]):
        if requirement.name not in ("torch", "fairseq_el"):
            version, _ = locked[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, requirement


def test_everything_in_the_lock_file_has_checksums():
    assert all(checksums for _, checksums in entries().values())


def test_torch_is_pinned_by_its_version_alone():
    assert "torch" not in entries()
    assert PROJECT["dependency-groups"]["torch"] == ["torch==2.13.0"]
    allowed = next(r for r in map(Requirement, GROUPS["package"]) if r.name == "torch")
    assert "2.13.0" in allowed.specifier


def test_nothing_runs_here_that_the_lock_file_does_not_have():
    """What a locked package needs is locked too, or could not have been imported in this suite."""
    locked = entries()
    for name in locked:
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            known = {*locked, "torch", "torchaudio", "pip"}  # fairseq asks for torchaudio, and works without
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in known, (name, line)


def test_our_requirements_include_those_of_fairseq():
    """It is installed without them."""
    ours = {canonicalize_name(Requirement(line).name) for line in GROUPS["package"] + GROUPS["build"]}
    needed = [Requirement(line) for line in metadata.requires("fairseq-fixed")]
    assert {canonicalize_name(r.name) for r in needed if r.marker is None} - ours == {"torchaudio"}


def test_without_fairseq_the_command_to_install_it_is_shown():
    tools, package = PROJECT["dependency-groups"]["build"], PROJECT["dependency-groups"]["fairseq"]
    assert shlex.split(INSTALL_FAIRSEQ) == [
        "pip", "install", *tools, "&&", "pip", "install", "--no-deps", "--no-build-isolation", *package
    ]  # fmt: skip
    script = """
import sys
class NotInstalled:
    def find_spec(name, path=None, target=None):
        if name == "fairseq":
            raise ModuleNotFoundError("No module named 'fairseq'", name="fairseq")
sys.meta_path.insert(0, NotInstalled)
try:
    import fairseq_el
except ImportError as error:
    print(error)
"""
    assert run_command(sys.executable, "-c", script).stdout == f"fairseq is not installed: {INSTALL_FAIRSEQ}\n"
