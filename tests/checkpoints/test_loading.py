"""Stock checkpoints load unchanged and safely; make_checkpoint.py writes such as were released."""
# Over 400 lines: all promises about loading checkpoints share its made files.

import argparse
import builtins
import os
import pickle
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import meters, metrics
from fairseq.models.bart import BARTModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from fairseq_el.checkpoints import loading
from fairseq_el.errors import UserError, explain
from fairseq_el.plugin.tasks import ELTranslationTask
from helpers import DEMO, ROOT, run_command
from make_checkpoint import main, make_checkpoint

TINY = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 64,
    "max_target_positions": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Makes tiny checkpoints, each kind once."""
    known = {}

    def make(arch: str = "bart_base", **options) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp(arch)
            known[key] = make_checkpoint(arch, folder, vocab=200, settings=TINY, **options)
        return known[key]

    return make


def task_for(folder: Path, task_class: type = TranslationTask, **options):
    config = TranslationConfig(
        data=str(folder), source_lang="source", target_lang="target", train_subset="train",
        dataset_impl=None, required_seq_len_multiple=1, **options,
    )  # fmt: skip
    return task_class.setup_task(OmegaConf.structured(config))


def load_with_fairseq(path: Path, folder: Path | None = None, task_class: type = TranslationTask):
    task = task_for(folder or path.parent, task_class)
    [model], _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    return model


def weights(path: Path) -> dict[str, torch.Tensor]:
    return loading.load(path)["model"]


def assert_equal_weights(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight.float(), theirs[name].float()), name


# --- old and new formats -----------------------------------------------------------------------


def test_the_demo_checkpoint_loads():
    assert loading.load(DEMO / "model.pt")["cfg"]["model"].arch == "bart_base"


@pytest.mark.parametrize("arch", ["bart_base", "transformer"])
def test_a_legacy_checkpoint_loads_in_fairseq_with_the_weights_of_the_current_format(made, arch):
    legacy = load_with_fairseq(made(arch, legacy=True))
    assert_equal_weights(legacy.state_dict(), weights(made(arch)))


def test_a_legacy_file_is_what_fairseq_released_in_2019(made):
    path = made(legacy=True)
    assert not zipfile.is_zipfile(path)
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        assert f"cfairseq.meters\n{name}\n".encode() in path.read_bytes()
    state = torch.load(path, weights_only=True)
    assert isinstance(state["args"], argparse.Namespace)
    assert (state["args"].ddp_backend, state["args"].left_pad_source) == ("no_c10d", "True")
    assert not hasattr(state["args"], "stop_min_lr")  # of a later fairseq; then, it was min_lr
    assert "cfg" not in state
    [loss] = [m for name, m in state["extra_state"]["train_meters"].items() if name == "train_loss"]
    assert type(loss) is meters.AverageMeter
    assert (loss.sum, loss.count) == (40.0, 20)


def test_a_tied_output_projection_may_be_absent_from_the_file(made):
    path = made(legacy=True)
    assert "decoder.output_projection.weight" not in weights(path)
    decoder = load_with_fairseq(path).decoder
    assert decoder.output_projection.weight is decoder.embed_tokens.weight


def test_an_output_projection_of_its_own_may_have_its_old_name(made):
    old = weights(made("transformer", legacy=True))
    new = weights(made("transformer"))
    assert "decoder.output_projection.weight" not in old
    assert torch.equal(old["decoder.embed_out"], new["decoder.output_projection.weight"])


def test_from_pretrained_loads_a_legacy_checkpoint(made):
    path = made(legacy=True)
    bart = BARTModel.from_pretrained(str(path.parent), checkpoint_file=path.name, bpe=None)
    assert_equal_weights(bart.model.state_dict(), weights(made()))


# --- <mask>, and dictionaries that don't fit ---------------------------------------------------


def test_the_row_of_mask_is_kept_for_a_dictionary_with_mask_and_dropped_for_one_without(made):
    masked, plain = made(mask=True), made()
    rows = weights(masked)["encoder.embed_tokens.weight"]
    assert rows.size(0) == 201
    for task_class in (TranslationTask, ELTranslationTask):
        kept = load_with_fairseq(masked, task_class=task_class)
        assert torch.equal(kept.encoder.embed_tokens.weight, rows.float())
        dropped = load_with_fairseq(masked, plain.parent, task_class=task_class)
        assert torch.equal(dropped.encoder.embed_tokens.weight, rows[:-1].float())


def test_mask_in_the_dictionary_but_not_in_the_checkpoint_is_said(made):
    with pytest.raises(UserError, match=r"<mask>.*200 rows, 201 entries.*delete the line"):
        load_with_fairseq(made(), made(mask=True).parent, task_class=ELTranslationTask)


def test_a_dictionary_of_another_model_is_refused_with_both_sizes_named(made, tmp_path):
    for side in ("source", "target"):
        (tmp_path / f"dict.{side}.txt").write_text("".join(f"w{n} 1\n" for n in range(50)))
    with pytest.raises(UserError, match=r"encoder embedding has 200 rows.* 54 entries.*dict.txt"):
        load_with_fairseq(made(), tmp_path, task_class=ELTranslationTask)


def test_the_target_dictionary_is_checked_as_well():
    dictionary = Dictionary()
    weight = torch.zeros(9, 2)
    with pytest.raises(UserError, match="decoder embedding has 9 rows, the target dictionary 4 "):
        loading.check_dictionary({"decoder.embed_tokens.weight": weight}, "decoder", dictionary)


def test_embeddings_that_are_no_table_of_a_dictionary_are_not_checked():
    loading.check_dictionary(
        {"decoder.embed_tokens.embeddings.0.0.weight": 1}, "decoder", Dictionary()
    )


# --- numpy in checkpoints ----------------------------------------------------------------------

ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(40, dtype=">i4"),
    np.array([True, False]),
    np.array([[0.5]], dtype=np.float16),
    np.array(2.5),
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("is_zip", [True, False])
def test_arrays_and_numbers_of_numpy_load_with_their_values_and_types(tmp_path, is_zip):
    numbers = [np.float64(2.5), np.float32(0.1), np.int64(-7), np.uint8(200), np.bool_(True)]
    path = tmp_path / "numpy.pt"
    torch.save([ARRAYS, numbers], path, _use_new_zipfile_serialization=is_zip)
    arrays, loaded = torch.load(path)
    for array, original in zip(arrays, ARRAYS, strict=True):
        assert array.dtype == pickle.loads(pickle.dumps(original)).dtype  # native byte order
        np.testing.assert_array_equal(array, original)
    assert loaded == numbers
    assert [type(number) for number in loaded] == [type(number) for number in numbers]


def test_numbers_of_numpy_1_load_too(tmp_path):
    path = tmp_path / "numpy1.pt"
    torch.save(np.float64(2.5), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    assert b"numpy._core" in content
    path.write_bytes(content.replace(b"cnumpy._core", b"cnumpy.core"))
    assert torch.load(path) == 2.5


def test_loaded_arrays_are_saved_as_plain_ones(tmp_path):
    torch.save(np.arange(3), tmp_path / "first.pt")
    torch.save(torch.load(tmp_path / "first.pt") + 1, tmp_path / "second.pt")
    assert b"fairseq_el" not in (tmp_path / "second.pt").read_bytes()
    plain = torch.load(tmp_path / "second.pt", weights_only=False)
    assert type(plain) is np.ndarray and plain.tolist() == [1, 2, 3]


def test_training_with_eval_bleu_can_be_resumed(tmp_path):
    """fairseq logs BLEU counts as arrays, which end up in every checkpoint of such a training."""
    metrics.reset()
    with metrics.aggregate("valid"):
        metrics.log_scalar("_bleu_counts", np.array([8, 4, 2, 1]))
    torch.save(metrics.state_dict(), tmp_path / "metrics.pt")
    metrics.reset()
    metrics.load_state_dict(torch.load(tmp_path / "metrics.pt"))
    with metrics.aggregate("valid"):
        metrics.log_scalar("_bleu_counts", np.array([1, 1, 1, 1]))
    assert metrics.get_meter("valid", "_bleu_counts").sum.tolist() == [9, 5, 3, 2]
    metrics.reset()


def test_entries_others_made_for_the_same_names_give_way():
    before = set(torch.serialization.get_safe_globals())
    mine = type("Mine", (), {})
    torch.serialization.add_safe_globals([np.dtype, np.ndarray, mine])
    loading.allow_released_classes()
    after = set(torch.serialization.get_safe_globals())
    assert after == before | {mine}


# --- files that smuggle code -------------------------------------------------------------------


class Call:
    """Pickled as a call of `function`, the way malicious files are made."""

    def __init__(self, function, *arguments, state=None):
        self.pickled = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.pickled


def object_dtype(flags: int) -> Call:
    """numpy's dtype of pointers to Python objects; without its flags it passes for numbers."""
    return Call(np.dtype, "O8", False, True, state=(3, "|", None, None, None, -1, -1, flags))


def smuggled(victim: Path) -> dict[str, object]:
    """Payloads by name: those that run code would create the file `victim`, others crash Python."""
    multiarray = np._core.multiarray
    call_system = Call(os.system, f"touch {victim}")

    def array(*state):
        return Call(multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, *state))

    return {
        "os.system": call_system,
        "eval": Call(builtins.eval, f"open({str(victim)!r}, 'w')"),
        "getattr": Call(getattr, object, "__subclasses__"),
        "subprocess": Call(subprocess.Popen, ["touch", str(victim)]),
        "nested pickle": Call(multiarray.scalar, np.dtype("O"), pickle.dumps(call_system)),
        "forged scalar": Call(multiarray.scalar, object_dtype(flags=0), b"A" * 8),
        "forged array": array((1,), object_dtype(flags=0), False, b"A" * 8),
        "short array": array((9,), np.dtype("i8"), False, b"A" * 8),
        "negative shape": array((-1, -1), np.dtype("i8"), False, b"A" * 8),
        "array of objects": np.array([call_system], dtype=object),
    }


def hide(payload: object, path: Path, is_zip: bool = True) -> Path:
    """A checkpoint that would do if it were not for the payload among its settings."""
    settings = argparse.Namespace(arch="bart_base", task="translation", note=payload)
    state = {"args": settings, "model": {}, "optimizer_history": [], "extra_state": {}}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    return path


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("name", smuggled(Path("victim")))
def test_a_checkpoint_that_smuggles_code_is_refused_and_runs_nothing(tmp_path, name, is_zip):
    victim = tmp_path / "victim"
    path = hide(smuggled(victim)[name], tmp_path / "evil.pt", is_zip)
    with pytest.raises(UserError, match="evil.pt was refused and nothing in it was run") as refused:
        loading.load(path)
    with pytest.raises(pickle.UnpicklingError) as stock:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert explain(stock.value) == str(refused.value)
    assert "\n" not in str(refused.value)
    assert "do not use it" in str(refused.value)
    assert not victim.exists()


def test_the_payloads_are_real(tmp_path):
    """Loaded without protection the same files do run code: the tests above can fail."""
    for name in ("os.system", "eval"):
        victim = tmp_path / name
        torch.load(hide(smuggled(victim)[name], tmp_path / "evil.pt"), weights_only=False)
        assert victim.exists()


def test_an_array_can_not_be_filled_a_second_time():
    """A tensor that shares the first contents would be left with freed memory."""
    kind = loading.NumberType("i8")
    array = loading.empty_array(loading.NumberArray, (0,), b"b")
    array.__setstate__((1, (2,), kind, False, b"A" * 16))
    with pytest.raises(pickle.UnpicklingError, match="filled twice"):
        array.__setstate__((1, (2,), kind, False, b"B" * 16))


def test_the_command_line_refuses_in_one_line(made, tmp_path):
    victim = tmp_path / "victim"
    path = hide(smuggled(victim)["os.system"], tmp_path / "evil.pt")
    done = run_command(
        "fairseq-generate", made().parent, "--path", path, "--user-dir", "fairseq_el",
        "-s", "source", "-t", "target",
    )  # fmt: skip
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "fairseq_el: error:" in line]
    assert errors == [done.stderr.splitlines()[-1]]
    assert "posix.system" in errors[0]
    assert "Traceback" not in done.stderr
    assert not victim.exists()


def test_a_refused_class_of_a_trusted_file_can_be_removed_as_the_message_says(made, tmp_path):
    state = torch.load(made(), weights_only=True)
    state["extra_state"]["vocabulary"] = Dictionary()
    path = tmp_path / "own.pt"
    torch.save(state, path)
    with pytest.raises(UserError, match=r"fairseq\.data\.dictionary\.Dictionary") as refused:
        loading.load(path)
    command = str(refused.value).split(": python -c ")[1].strip('"')
    subprocess.run([sys.executable, "-c", command], check=True)
    converted = load_with_fairseq(tmp_path / "own.pt.converted", made().parent)
    assert_equal_weights(converted.state_dict(), state["model"])


# --- files that are no checkpoints -------------------------------------------------------------


def cut_short(path: Path, source: Path) -> None:
    content = source.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def unusable(made) -> dict:
    return {
        "missing": (lambda path: None, "does not exist"),
        "folder": (lambda path: path.mkdir(), "is a folder"),
        "empty": (lambda path: path.touch(), "not a complete checkpoint"),
        "text": (lambda path: path.write_text("<html>404</html>"), "not a complete checkpoint"),
        "pickle": (
            lambda path: path.write_bytes(pickle.dumps([1, 2])),
            "not a complete checkpoint",
        ),
        "half a file": (lambda path: cut_short(path, made()), "not a complete checkpoint"),
        "half an old file": (
            lambda path: cut_short(path, made(legacy=True)),
            "not a complete checkpoint",
        ),
        "bare weights": (lambda path: torch.save({"weight": torch.ones(2)}, path), "not a fairseq"),
        "a tensor": (lambda path: torch.save(torch.ones(2), path), "not a fairseq"),
    }


@pytest.mark.parametrize("kind", unusable(None))
def test_what_is_not_a_checkpoint_is_named_in_one_line(made, tmp_path, kind):
    path = tmp_path / "model.pt"
    spoil, message = unusable(made)[kind]
    spoil(path)
    with pytest.raises(UserError, match=message) as ours:
        loading.load(path)
    assert str(path) in str(ours.value)
    with pytest.raises(
        Exception
    ) as stock:  # fairseq's own loading fails as it does, and is explained
        checkpoint_utils.load_model_ensemble([str(path)], task=task_for(made().parent))
    assert message in explain(stock.value)
    assert str(path) in explain(stock.value)


# --- make_checkpoint.py ------------------------------------------------------------------------


def test_made_weights_are_a_function_of_the_seed(made):
    again = make_checkpoint("bart_base", made().parent / "again", vocab=200, settings=TINY)
    assert_equal_weights(weights(again), weights(made()))
    other = weights(made(seed=2))
    assert not torch.equal(
        other["encoder.layers.0.fc1.weight"], weights(made())["encoder.layers.0.fc1.weight"]
    )


def test_made_weights_are_exact_in_half_precision(made):
    half, single = weights(made()), weights(made(dtype="fp32"))
    assert {weight.dtype for weight in half.values()} == {torch.float16}
    assert {weight.dtype for weight in single.values()} == {torch.float32}
    assert_equal_weights(half, single)


def test_a_made_checkpoint_has_the_entries_of_one_fairseq_train_wrote(made):
    trained, ours = (torch.load(path, weights_only=True) for path in (DEMO / "model.pt", made()))
    assert ours.keys() == trained.keys()
    assert ours["cfg"].keys() == trained["cfg"].keys()
    assert ours["cfg"]["task"].keys() == trained["cfg"]["task"].keys()
    assert vars(ours["cfg"]["model"]).keys() == vars(trained["cfg"]["model"]).keys()
    assert ours["optimizer_history"][-1].keys() == trained["optimizer_history"][-1].keys()
    final_norm = {
        f"{side}.layer_norm.{x}" for side in ("encoder", "decoder") for x in ("weight", "bias")
    }
    assert set(ours["model"]) == set(trained["model"]) - final_norm  # the demo model is pre-norm


def test_tied_embeddings_are_stored_once(made):
    stored = weights(made())
    tied = [
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.output_projection.weight",
    ]
    assert len({stored[name].data_ptr() for name in tied}) == 1


@pytest.mark.parametrize("arch", ["bart_base", "transformer"])
def test_a_made_model_says_different_things_about_different_sources(made, arch):
    model = load_with_fairseq(made(arch)).eval()
    dictionary = model.decoder.dictionary
    source = torch.randint(4, 200, (4, 20), generator=torch.Generator().manual_seed(1))
    source[:, -1] = dictionary.eos()
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=15)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((4,), 20)}}
    best = [found[0]["tokens"].tolist() for found in generator.generate([model], sample)]
    assert len({tuple(tokens) for tokens in best}) == 4
    assert sum(len(set(tokens)) for tokens in best) > sum(map(len, best)) / 4


@pytest.mark.parametrize("arch", ["bart_base", "transformer"])
def test_depth_does_not_magnify_rounding_in_a_made_model(tmp_path, arch):
    """Else no two implementations would agree on what the model says."""
    deep = {**TINY, "encoder_layers": 12, "decoder_layers": 12}
    path = make_checkpoint(arch, tmp_path, vocab=200, settings=deep)
    model = load_with_fairseq(path).eval()
    tokens = torch.randint(4, 200, (4, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        single, _ = model(tokens, torch.full((4,), 20), tokens)
        double, _ = model.double()(tokens, torch.full((4,), 20), tokens)
    torch.testing.assert_close(single.double(), double, atol=1e-3, rtol=0)


def test_a_language_model_can_be_made(tmp_path):
    settings = {"decoder_layers": 1, "decoder_embed_dim": 32, "decoder_attention_heads": 4}
    path = make_checkpoint("transformer_lm_gpt2_small", tmp_path, vocab=100, settings=settings)
    [model], _ = checkpoint_utils.load_model_ensemble(
        [str(path)], arg_overrides={"data": str(tmp_path)}
    )
    assert model.decoder.embed_tokens.weight.shape == (100, 32)


def test_the_command_line_makes_a_folder_that_its_own_suggestion_runs_on(tmp_path):
    folder = tmp_path / "a folder"
    script = ROOT / "scripts" / "make_checkpoint.py"
    shrink = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    done = run_command(
        sys.executable, script, "--arch", "bart_large", "--legacy", "--mask", "--vocab", "200",
        "--output", folder, "--sentences", "3", "--source-length", "20", *shrink,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    suggestion = done.stdout.splitlines()[-1].removeprefix("try: ")
    generated = run_command(*shlex.split(suggestion))
    assert generated.returncode == 0, generated.stderr
    assert sum(line.startswith("H-") for line in generated.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            "--arch bart_huge",
            "bart_huge is not an architecture this script can make: use one of bart_base,",
        ),
        ("--arch bart_base --set encoder_layer=2", "bart_base has no setting encoder_layer: check"),
        ("--arch bart_base --vocab 4", "a vocabulary of 4 has no room for words: use 5 or more"),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_in_one_line(
    tmp_path, monkeypatch, wrong, message
):
    monkeypatch.setattr(
        sys, "argv", ["make_checkpoint.py", "--output", str(tmp_path), *wrong.split()]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith(f"make_checkpoint: error: {message}")
    assert "\n" not in str(ended.value)
