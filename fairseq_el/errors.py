"""Errors that users can act on: one line that says what is wrong and what to do.

In fairseq's commands (fairseq-generate, fairseq-interactive, fairseq-train ...) an uncaught `UserError`, or a failure
of fairseq or torch that `explain` knows, ends the program with

    fairseq_el: error: <what is wrong>: <what to do>

on stderr and exit status 1. Any other exception keeps its traceback. FAIRSEQ_EL_TRACEBACK=1 shows the traceback of
explained errors too.
"""

import ast
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

TRACEBACK_VARIABLE = "FAIRSEQ_EL_TRACEBACK"


class UserError(Exception):
    """A mistake that the user can correct. The message says in one line what is wrong and what to do."""


def install_hook() -> None:
    """Prints explained errors of fairseq's commands as one line.

    All other exceptions go to the previous hook. Installing twice changes nothing.
    """
    previous = sys.excepthook
    if getattr(previous, "explains_fairseq_errors", False):
        return

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        message = explain(exc) if _came_through_command_line(trace) else None
        if message is None or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            previous(kind, exc, trace)
        if message is not None:
            print(f"fairseq_el: error: {message}", file=sys.stderr)

    hook.explains_fairseq_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def explain(exc: BaseException) -> str | None:
    """The one-line message for a failure that the user can act on, else None."""
    for explainer in _EXPLAINERS:
        message = explainer(exc)
        if message is not None:
            return " ".join(message.split())
    return None


# --- where an exception came from ------------------------------------------------------------


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _came_through_command_line(trace: TracebackType | None) -> bool:
    return any(_is_command_line(frame) for frame in _frames(trace))


def _is_command_line(frame: FrameType) -> bool:
    # By file, not by module name: `python fairseq_cli/generate.py` runs as `__main__`.
    return Path(frame.f_code.co_filename).parent.name == "fairseq_cli"


def _frame_in(exc: BaseException, module: str, function: str) -> FrameType | None:
    """The innermost frame of `module.function` that `exc` passed through."""
    found = None
    for frame in _frames(exc.__traceback__):
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == function:
            found = frame
    return found


def _file_torch_was_loading(exc: BaseException) -> str | None:
    """The checkpoint `torch.load` was reading when it failed, or None if it wasn't."""
    frame = _frame_in(exc, "torch.serialization", "load")
    if frame is None:
        return None
    opened = frame.f_locals.get("f")
    return str(getattr(opened, "name", opened))


# --- one function per kind of failure --------------------------------------------------------


def _user_error(exc: BaseException) -> str | None:
    return str(exc) if isinstance(exc, UserError) else None


def _model_file_not_found(exc: BaseException) -> str | None:
    match = re.fullmatch(r"Model file not found: (.*)", str(exc))
    if not isinstance(exc, OSError) or match is None:
        return None
    return (
        f"the checkpoint {match[1]} does not exist: give the path of a model file with --path "
        "(several, joined by ':', make an ensemble)"
    )


def _refused_checkpoint(exc: BaseException) -> str | None:
    path = _file_torch_was_loading(exc)
    if path is None or not isinstance(exc, pickle.UnpicklingError):
        return None
    return refusal(path, str(exc))


def refusal(path: str, reason: str) -> str | None:
    """The message for a file that torch's safe unpickler refused, or None if the file is just unreadable.

    reason: the text of the `UnpicklingError`.
    """
    named = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", reason)
    if named is None and "refused:" not in reason and "unrecognized function" not in reason:
        return None
    culprit = named[1] if named else "a disguised object"
    line = f"{path} was refused and nothing in it was run: it contains {culprit}"
    if named is None or _runs_code(culprit):
        return f"{line}, which does not belong in a model: do not use it, get the file from its source"
    # What is left is a class of somebody's own training code. Without it the file is loadable.
    keep = "{k: s[k] for k in ('args', 'cfg', 'model', 'optimizer_history') if k in s}"
    command = (
        f"import torch; s = torch.load('{path}', weights_only=False); "
        f"torch.save(dict({keep}, extra_state={{}}), '{path}.converted')"
    )
    package = culprit.split(".")[0]
    return (
        f"{line}, which is not a class of released fairseq checkpoints: if you trust whoever made "
        f'the file, convert it once, where {package} is installed: python -c "{command}"'
    )


def _runs_code(name: str) -> bool:
    """True for the standard library without its data types: malicious files call it."""
    # torch's message leaves "builtins." out, so a bare name is a builtin: eval, exec, getattr ...
    module = name.split(".")[0] if "." in name else "builtins"
    of_python_2 = {"__builtin__", "commands"}  # old names, under which pickles of protocol 2 call
    data_types = {"argparse", "collections", "datetime", "decimal", "enum", "fractions", "pathlib", "uuid"}
    return module in (sys.stdlib_module_names | of_python_2) - data_types


def _unreadable_checkpoint(exc: BaseException) -> str | None:
    """Any other failure inside torch.load: a truncated file, or another kind of file."""
    path = _file_torch_was_loading(exc)
    if path is None or isinstance(exc, OSError | MemoryError):
        return None
    return unreadable(path)


def unreadable(path: str) -> str:
    return f"{path} is not a complete checkpoint: it is truncated or another kind of file; copy or download it again"


def _not_from_fairseq(exc: BaseException) -> str | None:
    """A file that torch can read but fairseq did not write, such as bare weights."""
    frame = _frame_in(exc, "fairseq.checkpoint_utils", "load_checkpoint_to_cpu")
    if frame is not None and not is_from_fairseq(frame.f_locals.get("state")):
        return not_from_fairseq(str(frame.f_locals.get("path")))
    if frame is not None and isinstance(exc, KeyError):
        return (
            f"{frame.f_locals.get('path')} was trained with {exc}, which this fairseq does not "
            "know: its own code has to be imported, with --user-dir or before loading"
        )
    return None


def is_from_fairseq(state: object) -> bool:
    if not isinstance(state, dict) or "model" not in state:
        return False
    return state.get("args") is not None or state.get("cfg") is not None


def not_from_fairseq(path: str) -> str:
    return (
        f"{path} is not a fairseq checkpoint (it lacks 'model', or both 'args' and 'cfg'): "
        "give the file that fairseq-train saved or that a fairseq model was released as"
    )


def _damaged_checkpoint(exc: BaseException) -> str | None:
    """Any other failure while fairseq builds a model from the settings in a file and loads its weights."""
    loading = [("load_model_ensemble_and_task", "filename"), ("load_checkpoint_to_cpu", "path")]
    for function, argument in loading:
        frame = _frame_in(exc, "fairseq.checkpoint_utils", function)
        if frame is not None and isinstance(exc, Exception):
            return (
                f"{frame.f_locals.get(argument)} can't be loaded: its settings or weights are damaged, or of another "
                f"fairseq than this ({type(exc).__name__}: {str(exc)[:200]}): get it again, or see what fails with "
                f"{TRACEBACK_VARIABLE}=1"
            )
    return None


def _damaged_dictionary(exc: BaseException) -> str | None:
    frame = _frame_in(exc, "fairseq.data.dictionary", "add_from_file")
    if frame is None or not isinstance(exc, Exception) or isinstance(exc, OSError):
        return None
    opened = frame.f_locals.get("f")
    return not_a_dictionary(str(getattr(opened, "name", opened)), exc)


def not_a_dictionary(path: str, reason: Exception) -> str:
    return (
        f"{path} is not a dictionary with a word and its count per line: get the one that came with the checkpoint "
        f"({str(reason)[:160]})"
    )


def _setting_unknown_to_this_fairseq(exc: BaseException) -> str | None:
    """An old checkpoint with a setting that today's fairseq does not accept."""
    frame = _frame_in(exc, "fairseq.checkpoint_utils", "load_checkpoint_to_cpu")
    match = re.search(r"Error merging override (?:\w+\.)*(\w+)=(\S+)", str(exc))
    if frame is None or match is None:
        return None
    return (
        f"{frame.f_locals.get('path')} was saved with the setting {match[1]}={match[2]}, which "
        f"this fairseq does not accept: replace it with --model-overrides \"{{'{match[1]}': ...}}\""
    )


def _weights_do_not_fit(exc: BaseException) -> str | None:
    if not isinstance(exc, RuntimeError) or "in loading state_dict for" not in str(exc):
        return None
    wrong = re.search(
        r"size mismatch for (\S+): copying a param with shape torch.Size\(\[([\d, ]*)\]\) from "
        r"checkpoint, the shape in current model is torch.Size\(\[([\d, ]*)\]\)",
        str(exc),
    )
    if wrong is None:
        return (
            "the checkpoint's weights do not fit the architecture named in it: leave out the "
            "--model-overrides that change the model, and use the code that trained it"
        )
    name, stored, built = wrong.groups()
    if "embed_tokens" in name:
        rows, entries = (int(shape.split(",")[0]) for shape in (stored, built))
        return dictionary_mismatch(name.split(".")[0], rows, entries)
    return (
        f"the checkpoint's {name} is of shape [{stored}] but the model wants [{built}]: leave out "
        "the --model-overrides that change the model, and use the code that trained it"
    )


def dictionary_mismatch(side: str, rows: int, entries: int) -> str:
    which = "source" if side == "encoder" else "target"
    return (
        f"the dictionary does not fit the checkpoint: its {side} embedding has {rows:,} rows, the "
        f"{which} dictionary {entries:,} entries (special symbols included): put the dict.txt that "
        f"came with the checkpoint into the data folder as dict.<{which} language>.txt and "
        "binarise the data with it (fairseq-preprocess --srcdict / --tgtdict)"
    )


def _sentence_too_long(exc: BaseException) -> str | None:
    match = re.match(r"Size of sample #(\d+) is invalid \(=(.*)\) since max_positions=(.*), ", str(exc))
    if match is None:
        return None
    sizes, limits = _numbers(match[2]), _numbers(match[3])
    side, size, limit = "", sizes[0], limits[0]
    if len(sizes) == len(limits) == 2:
        too_long_source = sizes[0] > limits[0]
        side = "source" if too_long_source else "target"
        size, limit = (sizes[0], limits[0]) if too_long_source else (sizes[1], limits[1])
    line = f"sentence {match[1]} has {size:,} {side} tokens, the model has positions for {limit:,}"
    skip = "leave such sentences out with --skip-invalid-size-inputs-valid-test"
    # fairseq-interactive ignores --truncate-source; cutting targets would change the references.
    if side != "source" or any("interactive" in f.f_code.co_filename for f in _frames(exc.__traceback__)):
        return f"{line}: shorten it, or {skip}"
    return f"{line}: cut sources with --truncate-source --max-source-positions {limit}, or {skip}"


def _numbers(text: str) -> list[int]:
    """The integers of '(1500, 60)', '1500', or numpy 2's '(np.int32(1500), np.int32(60))'."""
    plain = re.sub(r"np\.\w+\((\d+)\)", r"\1", text)
    value = ast.literal_eval(plain)
    return list(value) if isinstance(value, tuple | list) else [value]


def _batch_too_small(exc: BaseException) -> str | None:
    match = re.fullmatch(r"Sentences lengths should not exceed max_tokens=(\d+)", str(exc))
    if match is None:
        return None
    return (
        f"there are sentences of more tokens than a batch may hold with --max-tokens {match[1]}: "
        "give a larger --max-tokens, or leave it out and give --batch-size"
    )


def _nothing_to_generate(exc: BaseException) -> str | None:
    """fairseq divides by a time of zero, or takes the last of no batches."""
    frames = list(_frames(exc.__traceback__))
    if isinstance(exc, IndexError) and frames and frames[-1].f_code.co_name == "batch_by_size":
        return (
            "no sentence is left to work on: the data are empty, or all of it is too long for the "
            "model; check --gen-subset and the lengths"
        )
    if isinstance(exc, ZeroDivisionError) and frames and _is_command_line(frames[-1]):
        return (
            "no sentence was generated: the data are empty, or none of it fits the model; check "
            "--gen-subset and the lengths"
        )
    return None


def _data_not_found(exc: BaseException) -> str | None:
    match = re.fullmatch(r"Dataset not found: (\S+) \((.*)\)", str(exc))
    if match is None:
        return None
    return (
        f"there is no '{match[1]}' data for this pair of languages in {match[2]}: name another subset with "
        "--gen-subset, binarise it with fairseq-preprocess, or add --dataset-impl raw for text"
    )


def _languages_unknown(exc: BaseException) -> str | None:
    if "Could not infer language pair" not in str(exc):
        return None
    return (
        "the data folder does not name the languages (no file like test.source-target.source.idx): give --source-lang "
        "and --target-lang"
    )


def _file_problem(exc: BaseException) -> str | None:
    name = getattr(exc, "filename", None)
    if not isinstance(name, str) or not isinstance(exc, OSError):
        return None
    if isinstance(exc, IsADirectoryError):
        return f"{name} is a folder: give a file in it, such as {Path(name) / 'model.pt'}"
    if isinstance(exc, PermissionError):
        return f"{name} may not be read or written by this user: change its permissions"
    if not isinstance(exc, FileNotFoundError):
        return f"{name} can't be read or written: {exc.strerror}"
    if re.fullmatch(r"dict\..*txt", Path(name).name):
        return (
            f"the dictionary {name} does not exist: put the dict.txt that came with the checkpoint "
            "there, or correct the data folder or --source-lang and --target-lang"
        )
    return f"{name} does not exist: check the path"


def _options_that_clash(exc: BaseException) -> str | None:
    """fairseq checks options with assertions such as '--sampling-topk requires --sampling'."""
    if not isinstance(exc, AssertionError | ValueError) or not re.search("--[a-z]", str(exc)):
        return None
    return f"the options do not go together: {exc}"


def is_out_of_memory(exc: BaseException) -> bool:
    """Python's error, torch's for a GPU, or a failed allocation inside torch."""
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    return isinstance(exc, RuntimeError) and re.search(_FAILED_ALLOCATION, str(exc)) is not None


# torch on a CPU under Linux and Windows, C++, oneDNN under a memory limit, a GPU, cuBLAS, cuDNN ...
_FAILED_ALLOCATION = (
    r"can't allocate memory|not enough memory|std::bad_alloc|could not create a primitive|CUDA out of memory|"
    r"STATUS_ALLOC_FAILED"
)


def _out_of_memory(exc: BaseException) -> str | None:
    if not is_out_of_memory(exc):
        return None
    return "there is not enough memory: use a smaller --batch-size, --max-tokens or --beam"


_EXPLAINERS: tuple[Callable[[BaseException], str | None], ...] = (
    _user_error,
    _model_file_not_found,
    _file_problem,
    _refused_checkpoint,
    _unreadable_checkpoint,
    _not_from_fairseq,
    _setting_unknown_to_this_fairseq,
    _weights_do_not_fit,
    _sentence_too_long,
    _batch_too_small,
    _nothing_to_generate,
    _data_not_found,
    _languages_unknown,
    _out_of_memory,
    _damaged_dictionary,
    _damaged_checkpoint,
    _options_that_clash,
)
