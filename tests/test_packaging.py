"""What is installed is what setup.py asks for, in the versions and with the checksums of the lock file."""

import re
import runpy
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import ROOT

REQUIREMENTS = runpy.run_path(str(ROOT / "setup.py"))["REQUIREMENTS"]
INSTALLED = [group for group in REQUIREMENTS if group != "benchmark"]  # by make


ENTRY = re.compile(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*")


def entries() -> dict[str, tuple[str, list[str]]]:
    """By name, each version in the lock file and its checksums."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        name, version, checksums = ENTRY.fullmatch(line).groups()
        found[canonicalize_name(name)] = (version, checksums.split())
    return found


def requirements(*groups: str) -> list[Requirement]:
    wanted = [Requirement(line) for group in groups for line in REQUIREMENTS[group]]
    return [requirement for requirement in wanted if not requirement.marker or requirement.marker.evaluate()]


@pytest.mark.parametrize("group", INSTALLED)
def test_the_lock_file_has_what_setup_asks_for(group):
    locked = entries()
    for requirement in requirements(group):
        if requirement.name != "torch":
            version, _ = locked[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, requirement


def test_everything_in_the_lock_file_has_checksums():
    assert all(checksums for _, checksums in entries().values())


def test_torch_is_pinned_by_its_version_alone():
    assert "torch" not in entries()
    assert [str(r) for r in requirements("torch") if r.name == "torch"] == ["torch==2.13.0"]


def test_nothing_runs_here_that_the_lock_file_does_not_have():
    """What a locked package needs is locked too, or could not have been imported in this suite."""
    locked = entries()
    for name in locked:
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            known = {*locked, "torch", "torchaudio", "pip"}  # fairseq asks for torchaudio, and works without
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in known, (name, line)
