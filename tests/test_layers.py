"""Imports go one way: down the layers of the package, and never in a circle."""

import ast
import graphlib
from collections.abc import Iterator

import pytest

from helpers import ROOT

# Low to high. A module may import its own layer and the ones before it.
LAYERS = [
    "errors", "heap", "resources", "lazy_import", "kernels", "checkpoints", "models", "generation", "text", "plugin",
    "jobs", "serve", "__init__", "cli", "__main__",
]  # fmt: skip
PACKAGE = ROOT / "fairseq_el"


def module_name(path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1] if "." in module else "__init__")


def imports(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Modules of ours that a module imports, anywhere in it, with the line. A module's name in a string counts: it is
    there for importlib."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names = [node.value]
        yield from ((name, node.lineno) for name in names if name in MODULES)


def upward(modules: dict[str, ast.Module]) -> list[str]:
    return [
        f"{module}, line {line}, imports {name}"
        for module, tree in modules.items()
        for name, line in imports(module, tree)
        if layer(name) > layer(module)
    ]


def graph(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    return {module: {name for name, _ in imports(module, tree)} for module, tree in modules.items()}


def test_every_module_is_in_a_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == set(LAYERS)


def test_no_module_imports_upwards():
    assert upward(MODULES) == []


def test_no_modules_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(graph(MODULES)).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize(
    "line",
    [
        "import fairseq_el.jobs.presets",
        "from fairseq_el.jobs import presets",
        "from fairseq_el.jobs.presets import Preset",
        "def f():\n    from fairseq_el.jobs import presets",
        "importlib.import_module('fairseq_el.jobs.presets')",
    ],
)
def test_an_import_upwards_and_a_circle_are_found(line):
    """However it is written: or the tests above could pass by seeing nothing."""
    lower = {"fairseq_el.errors": ast.parse(line)}
    assert len(upward(lower)) == 1
    circle = {**lower, "fairseq_el.jobs.presets": ast.parse("from fairseq_el.errors import UserError")}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph(circle)).prepare()


def test_sub_packages_say_what_they_hold():
    packages = [name for name in MODULES if (ROOT / name.replace(".", "/")).is_dir()]
    assert len(packages) > 5
    assert [name for name in packages if not ast.get_docstring(MODULES[name])] == []
