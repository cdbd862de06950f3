"""Importing fairseq_el registers the plugin, quietly."""

import sys

import pytest

from helpers import run_command


@pytest.mark.parametrize("before", ["", "import scipy; ", "import sklearn.metrics; "])
def test_importing_prints_nothing_about_optional_libraries(before):
    """fairseq logs "Please install tensorboardX" and the like while it is imported."""
    without = "import sys; sys.modules['tensorboardX'] = None; "
    done = run_command(sys.executable, "-c", f"{without}{before}import fairseq_el; import fairseq.tasks")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    stock = run_command(sys.executable, "-c", f"{without}import fairseq")
    assert "Please install tensorboardX" in stock.stderr
