"""On a machine with little memory, models load and batches go through where stock fairseq runs out of it."""

import json
import sys

import pytest
import torch
from torch import nn

import fairseq_el.plugin.tasks
from fairseq_el import Summarizer
from fairseq_el.checkpoints.meta_init import build_on_meta, precision_of
from fairseq_el.jobs.batching import Source
from helpers import DEMO, run_command
from make_checkpoint import make_checkpoint

resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")

SHAPE = {
    "encoder_layers": 1, "decoder_layers": 12, "encoder_embed_dim": 512, "decoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 512, "decoder_ffn_embed_dim": 512, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
}  # fmt: skip
LIMIT = 150 << 20  # bytes; K and V of the batch below take 300 MB, the encoder's output 12 MB
TINY = {name: 32 if name.endswith("dim") else 2 for name in SHAPE}

# Loads a model, lets it do one text, so that threads and kernels are there, and only then limits the process: what
# counts is what the batch takes.
LIMITED = """
import json, resource, sys
import torch
from fairseq_el import Summarizer
from fairseq_el.errors import is_out_of_memory
from fairseq_el.jobs.batching import Source

model, encoding, stock, extra = sys.argv[1], sys.argv[2], sys.argv[3] == "stock", int(sys.argv[4])
torch.set_num_threads(1)
options = {"max_len_b": 4} | ({} if stock else {"el_attention": "always"})
system = Summarizer.load(model, "demo", bpe_dir=encoding, stock=stock, cpu=True, **options)
numbers = torch.Generator().manual_seed(1)
texts = [Source(torch.randint(4, 500, (511,), generator=numbers).tolist(), False) for _ in range(12)]
system.generate(texts[:1])
size = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
if extra:
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))
try:
    print(json.dumps([best.summary for best, in system.generate(texts)]))
except Exception as error:
    print(json.dumps("out of memory" if is_out_of_memory(error) else repr(error)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint("bart_base", tmp_path_factory.mktemp("bart"), vocab=6000, settings=SHAPE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the size of a process as Linux tells it")
def test_a_batch_goes_through_under_a_limit_at_which_stock_fairseq_dies(model):
    def run(system: str, extra: int):
        done = run_command(sys.executable, "-c", LIMITED, model, DEMO, system, extra)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    unlimited = run("el", 0)
    assert len(unlimited) == 12
    assert run("el", LIMIT) == unlimited == run("stock", 0)
    assert run("stock", LIMIT) == "out of memory"


# ---- loading


def test_models_are_built_without_weights_of_their_own(model, monkeypatch):
    """Of random weights not one is drawn, and none is in single precision beside the checkpoint's in half."""
    built = []

    def watch(build, dtype):
        built.append(build_on_meta(build, dtype))
        return built[-1]

    monkeypatch.setattr(fairseq_el.plugin.tasks, "build_on_meta", watch)
    before = torch.get_rng_state()
    Summarizer.load(model, "demo", bpe_dir=DEMO, cpu=True)
    assert len(built) == 1 and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("arch", ["bart_base", "transformer"])  # learned positions, and computed ones
def test_a_model_built_on_meta_holds_what_stock_fairseq_loads(tmp_path, arch, dtype):
    path = make_checkpoint(arch, tmp_path, vocab=6000, settings=TINY, dtype=dtype)
    numbers = torch.Generator().manual_seed(1)
    sources = [Source(torch.randint(4, 6000, (20,), generator=numbers).tolist(), False) for _ in range(3)]
    options = {"bpe_dir": DEMO, "cpu": True, "max_len_b": 6}
    ours, stock = (Summarizer.load(path, "demo", stock=is_stock, **options) for is_stock in (False, True))
    tokens = [[best.tokens for (best,) in system.generate(sources)] for system in (ours, stock)]
    assert tokens[0] == tokens[1]
    mine, theirs = ours.model.state_dict(), stock.model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(mine[name].float(), weight), name


def test_what_no_checkpoint_holds_is_computed_as_ever():
    class Computing(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    assert torch.equal(build_on_meta(Computing, torch.float16).table, torch.arange(3.0))


def test_only_whole_checkpoints_in_half_precision_are_taken_for_such():
    half, single = torch.zeros(2).half(), torch.zeros(2)
    assert precision_of({"a": half, "version": torch.tensor([3.0])}) == torch.float16
    assert precision_of({"a": half, "b": single}) == precision_of({"b": single}) == torch.float32
