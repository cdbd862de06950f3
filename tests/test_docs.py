"""The documentation names only what exists: files, headings, commands, options, defaults and measured numbers."""

import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.dataclass.configs import DatasetConfig, GenerationConfig
from fairseq.tasks import TASK_DATACLASS_REGISTRY

import fairseq_el  # noqa: F401  registers the tasks
from fairseq_el.text.rouge import RougeConfig
from helpers import ROOT, write_gpt2_encoding
from make_checkpoint import make_checkpoint

PAGES = sorted([*ROOT.glob("*.md"), ROOT / "demo" / "README.md", *(ROOT / "docs").rglob("*.md")])
TASKS = ("translation", "language_modeling")
RETIRED = re.compile(
    r"SourceMemory|BeamHistory|SharedMemory|PromptMemory|PanelWeight|WholeFile|one_by_one|vacant|\bexhibits?\b"
    r"|roofline\.py|el-block-ngrams|scripts/(summarize|evaluate|score|convert_hf|merge_shards|prepare_data)\.py"
    r"|--attention\b|--lsum\b|--memory-budget\b|as (it|they) lies?\b"
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def each_page(*chosen: Path):
    return pytest.mark.parametrize("page", chosen or PAGES, ids=name_of)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> list[list[str]]:
    """The words of each `fairseq-el` command in a block of code, without the comment behind it."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    code = re.findall(r"^    (.*)$", text, re.MULTILINE) + "\n".join(blocks(page, "sh")).splitlines()
    return [line.partition("#")[0].split() for line in code if line.startswith("fairseq-el ")]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What `fairseq-el --help` prints, under "", and `fairseq-el COMMAND --help` of every command that it lists."""

    def start(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "fairseq_el", *words, "--help"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    overview = start().communicate()[0]
    names = re.findall(r"^ +([a-z]+) {2,}\w", overview, re.MULTILINE)
    started = {name: start(name) for name in names}
    return {"": overview} | {name: process.communicate()[0] for name, process in started.items()}


def generation_options() -> set[str]:
    """What a preset can have."""
    configs = [GenerationConfig, DatasetConfig, RougeConfig, *(TASK_DATACLASS_REGISTRY[task] for task in TASKS)]
    return {f"--{field.name.replace('_', '-')}" for config in configs for field in fields(config)}


def test_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@each_page()
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@each_page()
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/.-])(?:scripts|tests|fairseq_el|docs|demo|configs)/[\w./-]*\w", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), path


@each_page()
def test_no_page_uses_retired_names(page):
    assert not (found := RETIRED.search(page.read_text(encoding="utf-8"))), found[0]


@each_page()
def test_subcommands_that_a_page_names_exist(page, helps):
    named = set(re.findall(r"fairseq-el ([a-z]+)", page.read_text(encoding="utf-8")))
    assert named <= set(helps)


@each_page()
def test_options_of_commands_exist(page, helps):
    for command, name, *words in command_lines(page):
        known = generation_options() if name in ("summarize", "translate", "evaluate") else set()
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in known or re.search(rf"{option}\b", helps[name]), f"{command} {name} {option}"


@each_page()
def test_el_options_exist(page, helps):
    known = generation_options() | set(re.findall(r"--el-[a-z-]+[a-z]", "".join(helps.values())))
    assert set(re.findall(r"--el-[a-z-]+[a-z]", page.read_text(encoding="utf-8"))) <= known


def test_usage_names_every_subcommand(helps):
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    assert len(helps) > 6
    assert all(f"fairseq-el {name}" in text for name in helps)


def test_options_lists_every_el_option_with_its_default():
    rows = re.findall(r"^\| `--(el-[\w-]+)` \| (.*?) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    listed = {name.replace("-", "_"): default.strip("`") for name, default in reversed(rows)}
    words = {None: "no limit", False: "off"}
    for field in (field for task in TASKS for field in fields(TASK_DATACLASS_REGISTRY[task])):
        if field.name.startswith("el_"):
            assert listed[field.name] == words.get(field.default, str(field.default)), field.name


def test_options_lists_every_environment_variable():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fairseq_el").rglob("*.py"))
    known = set(re.findall(r"FAIRSEQ_EL_[A-Z]+", sources))
    assert known == set(re.findall(r"FAIRSEQ_EL_[A-Z]+", (ROOT / "docs" / "options.md").read_text()))


def test_options_lists_every_preset():
    text = (ROOT / "docs" / "options.md").read_text().split("## Presets")[1]
    assert all(f"`{preset.stem}`" in text for preset in (ROOT / "configs").glob("*.yaml"))


def test_the_package_map_has_every_folder_of_the_package():
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Package map")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "fairseq_el").glob("*/__init__.py"))


@pytest.mark.parametrize("picture", ["el_attention.svg", "data_flow.svg"])
def test_pictures_are_well_formed_and_have_a_dark_form(picture):
    tree = ElementTree.parse(ROOT / "docs" / picture)
    assert tree.getroot().find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in (ROOT / "docs" / picture).read_text()


# ---- Python on the pages runs, and fetches nothing


@pytest.fixture
def offline(monkeypatch):
    def refuse(*address, **options):
        raise AssertionError(f"fetches from {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def released_bart(tmp_path, monkeypatch) -> Path:
    """The current folder, with files as the release of BART-large-CNN has them."""
    rows = write_gpt2_encoding(tmp_path / "gpt2_bpe")
    sizes = {"embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2, "layers": 1}
    settings = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    make_checkpoint("bart_large", tmp_path / "bart.large.cnn", vocab=rows, settings=settings)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks(ROOT / "docs" / "usage.md", "python"))
def test_python_on_the_page_of_usage_runs_offline(block, offline, released_bart, capsys):
    exec(compile(block, "docs/usage.md", "exec"), {})
    assert capsys.readouterr().out.strip()
