"""Packed model folders: what was packed and stored generates as what is packed in memory, and loads without a copy."""

import json
import re
import shutil

import pytest
import torch

import hf_models
from fairseq_el.checkpoints import packed_file
from fairseq_el.errors import UserError
from fairseq_el.jobs.packed_folder import write_packed
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.kernels import build
from fairseq_el.kernels.linear import PackedLinear
from fairseq_el.kernels.packing import HalfEmbedding
from helpers import ARTICLES, DEMO, TEXTS, run_command

PRECISIONS = ["auto", "fp32", "fp16", "bf16", "int8"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("packed")
    return {precision: write_packed("demo", base / precision, precision).parent for precision in PRECISIONS}


def hypotheses(model, texts=TEXTS[:8], **options):
    found = Summarizer.load(model, "demo", threads=1, **options).detailed(texts, 4)
    return [[(other.summary, other.tokens, other.score) for other in (one, *one.alternatives)] for one in found]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hypotheses_are_those_of_the_model_packed_in_memory(folders, precision):
    """Token for token; to the last bit, as the arithmetic is the same."""
    options = {"el_attention": "never"}  # `auto` depends on how fast the machine is
    expected = hypotheses("demo", precision=precision, **options)
    assert hypotheses(folders[precision], **options) == expected


@pytest.mark.parametrize("precision", PRECISIONS)
def test_folders_also_work_without_the_kernels(folders, precision, monkeypatch):
    monkeypatch.setattr(build, "library", lambda: None)
    found = Summarizer.load(folders[precision], "demo")(TEXTS[:2])
    assert found == Summarizer.load("demo", "demo", precision=precision)(TEXTS[:2])


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_nothing_large_is_copied_when_a_folder_is_loaded(folders, precision):
    model = Summarizer.load(folders[precision], "demo").model
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0] for line in maps if str(folders[precision]) in line]
    ranges = [[int(number, 16) for number in part.split("-")] for part in mapped]
    layers = [module.matrix.stored for module in model.modules() if isinstance(module, PackedLinear)]
    tensors = [getattr(stored, "stored", stored).packed for stored in layers]
    tensors += [module.weight for module in model.modules() if isinstance(module, HalfEmbedding)]
    assert len(tensors) > 10
    for tensor in tensors:
        assert any(begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for begin, end in ranges)
        assert tensor.data_ptr() % packed_file.ALIGNMENT == 0


def test_int8_takes_less_than_two_thirds_of_half_precision(folders):
    sizes = {name: (folder / packed_file.NAME).stat().st_size for name, folder in folders.items()}
    assert sizes["int8"] < 0.67 * sizes["fp16"]


def test_fairseq_generate_takes_a_folder(folders, demo_data):
    search = ["--beam", 2, "--max-len-b", 20, "--user-dir", "fairseq_el", "--el-attention", "never"]
    printed = []
    for words in ([DEMO / "model.pt", "--el-precision", "int8"], [folders["int8"] / "model.pt"]):
        done = run_command("fairseq-generate", demo_data, "--path", *words, *search)
        assert done.returncode == 0, done.stderr
        assert "precision int8, not exact" in done.stderr
        printed.append(re.findall(r"^[HD]-.*$", done.stdout, flags=re.MULTILINE))
    assert printed[0] == printed[1] and len(printed[0]) == 2 * 96


@pytest.mark.parametrize(
    ("model", "preset", "options"),
    [
        (hf_models.bart, "plain", {"max_len_b": 20}),
        (hf_models.gpt2, "gpt2_cnndm", {"max_new_tokens": 8, "longest_source": 20}),
    ],
)
def test_a_hugging_face_folder_is_packed(model, preset, options, tmp_path):
    source = hf_models.save(model(), tmp_path / "hf")
    folder = write_packed(source, tmp_path / "packed", "int8").parent
    expected = Summarizer.load(source, preset, "beam", precision="int8", **options)(ARTICLES)
    assert Summarizer.load(folder, preset, "beam", **options)(ARTICLES) == expected


def test_the_command_packs_and_describes(tmp_path):
    done = run_command("fairseq-el", "convert", "--precision", "int8", "demo", tmp_path / "demo")
    assert done.returncode == 0 and "packed.safetensors (" in done.stdout, done.stderr
    model = json.loads(run_command("fairseq-el", "info", "--json", "--model", tmp_path / "demo").stdout)["model"]
    assert model["precision"].startswith("int8, packed")


# ---- mistakes


@pytest.fixture
def folder(folders, tmp_path):
    return shutil.copytree(folders["int8"], tmp_path / "copy")


def problem_of(model, **options) -> str:
    with pytest.raises(UserError) as caught:
        Summarizer.load(model, "demo", **options)
    return str(caught.value)


def test_a_damaged_file_is_named_in_one_line(folder):
    path = folder / packed_file.NAME
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    expected = f"{path} is damaged or incomplete: copy it again, or make it again with fairseq-el convert"
    assert problem_of(folder) == expected
    done = run_command("fairseq-el", "summarize", "--model", folder, "--preset", "demo", input="a text\n")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"summarize: error: {expected}"


def test_another_version_is_named_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(packed_file, "VERSION", 2)
    assert "has version 1 of the packed format, and this fairseq_el reads version 2: convert" in problem_of(folder)


def test_files_of_two_models_do_not_mix(folder, folders):
    shutil.copyfile(folders["bf16"] / packed_file.NAME, folder / packed_file.NAME)
    assert problem_of(folder).endswith("does not belong to the checkpoint beside it: copy both again")
    (folder / packed_file.NAME).unlink()
    assert problem_of(folder).endswith("packed.safetensors is missing: copy the whole folder of the model")


@pytest.mark.parametrize("change", ["out", "type", "name", "missing"])
def test_tensors_that_kernels_would_read_past_are_refused(folder, change, monkeypatch):
    """A file made to do harm, with the right checksums."""
    file = packed_file.PackedFile(folder / packed_file.NAME)
    tensors, contents = file.load(), file.contents
    if change == "out":
        tensors["0.packed"] = tensors["0.packed"][:, :-1].contiguous()
    elif change == "type":
        tensors["0.bias"] = tensors["0.bias"].half()
    elif change == "name":
        contents["layers"][0]["names"][0] = "encoder.layers.0.self_attn"
    else:
        del tensors["0.totals"]
    digest = packed_file.write(folder / packed_file.NAME, tensors, contents)
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save(state | {"model": {packed_file.MARKER: digest}}, folder / "model.pt")
    assert "is damaged or incomplete" in problem_of(folder)


def test_options_that_a_packed_model_can_not_follow(folder, tmp_path):
    assert "leave out the precision bf16" in problem_of(folder, precision="bf16")
    assert "leave out --stock and --fp16" in problem_of(folder, stock=True)
    Summarizer.load(folder, "demo", precision="int8")
    with pytest.raises(UserError, match="has the model itself: give another folder"):
        write_packed(folder, folder, "int8")
    done = run_command("fairseq-el", "convert", "--reverse", folder, tmp_path / "hf")
    assert done.returncode == 1 and "is a packed model: give the model that it was made from" in done.stderr
