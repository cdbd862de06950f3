"""Every effect of importing `fairseq_el`, in one function."""

import functools
import importlib
from contextlib import suppress
from pathlib import Path

from fairseq_el import errors, lazy_import
from fairseq_el.plugin import log_filters, threads
from fairseq_el.resources import USER_DIR


@functools.cache
def register() -> None:
    """Registers the plugin with fairseq and torch. The second call does nothing.

    - models: `el_transformer`, `el_bart` and `el_transformer_lm`, with an architecture for each stock one
    - tasks: `el_translation`, `el_language_modeling` and `stock_cache_meter`; the names of all stock tasks now mean
      our subclasses of them, so that command lines need no change
    - as a `--user-dir`, of fairseq's examples: the task `translation_moe` and the model `transformer_pointer_generator`
    - the scorer `rouge`
    - the environment: GOMP_SPINCOUNT, unless it or OMP_WAIT_POLICY is set or torch was imported before
    - torch's safe globals: adds the classes in released checkpoints
    - numpy: restores names that fairseq 0.12 uses
    - logging and warnings: ignores messages of fairseq's libraries that users can't act on
    - `sys.excepthook`: prints errors of fairseq's commands in one line
    """
    threads.limit_spinning()
    log_filters.silence_library_notices()
    with log_filters.no_import_notices():
        lazy_import.import_fairseq()
    errors.install_hook()
    _register_examples()
    _register_models()
    _register_tasks()
    _register_scorer()

    from fairseq_el.checkpoints import loading
    from fairseq_el.plugin import compatibility

    loading.allow_released_classes()
    compatibility.restore_numpy_names()


def _register_examples() -> None:
    """As a `--user-dir`, adds what stock fairseq takes from its examples with a `--user-dir` of their own: a command
    line has only one. In Python these can be imported, and would be there twice."""
    from fairseq.utils import import_user_module

    if any(Path(folder).name == USER_DIR.name for folder in getattr(import_user_module, "memo", ())):
        for module in ("translation_moe.translation_moe_src", "pointer_generator.pointer_generator_src"):
            with suppress(ModuleNotFoundError):  # not all packages of fairseq have the examples
                importlib.import_module(f"fairseq.examples.{module}")


def _register_models() -> None:
    from fairseq.models import (
        ARCH_CONFIG_REGISTRY,
        ARCH_MODEL_INV_REGISTRY,
        register_model,
        register_model_architecture,
    )
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    from fairseq_el.models import conversion

    register_model("el_transformer")(conversion.ELTransformerModel)
    register_model("el_bart")(conversion.ELBARTModel)
    register_model("el_transformer_lm", dataclass=TransformerLanguageModelConfig)(conversion.ELTransformerLanguageModel)
    for family in conversion.FAMILIES:
        for stock in list(ARCH_MODEL_INV_REGISTRY[family]):
            twin = conversion.PREFIX + stock
            if twin not in ARCH_CONFIG_REGISTRY:  # fairseq has registered the one named like its model
                register_model_architecture(conversion.PREFIX + family, twin)(ARCH_CONFIG_REGISTRY[stock])


def _register_tasks() -> None:
    from fairseq.tasks import register_task

    from fairseq_el.plugin import stock_cache_meter, tasks

    register_task("el_translation", dataclass=tasks.ELTranslationConfig)(tasks.ELTranslationTask)
    register_task("el_language_modeling", dataclass=tasks.ELLanguageModelingConfig)(tasks.ELLanguageModelingTask)
    _replace_task("translation", tasks.ELTranslationTask, tasks.ELTranslationConfig)
    _replace_task("language_modeling", tasks.ELLanguageModelingTask, tasks.ELLanguageModelingConfig)
    register_task("stock_cache_meter", dataclass=stock_cache_meter.MeteredConfig)(stock_cache_meter.MeteredTask)
    accelerate_tasks()


def accelerate_tasks() -> None:
    """Registers our subclass of each stock task under the stock name. fairseq's classes are not changed.

    For tasks of other modules that are imported after `fairseq_el`, such as `translation_moe` in fairseq's examples,
    call it again.
    """
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    from fairseq_el.plugin import options, stock_cache_meter, tasks

    for name, task in list(TASK_REGISTRY.items()):
        if not issubclass(task, tasks.ELGeneration | stock_cache_meter.MeteredTask):
            config = TASK_DATACLASS_REGISTRY.get(name)
            _replace_task(name, tasks.el_task(task), options.el_config(config) if config else None)


def _replace_task(name: str, task: type, config: type | None) -> None:
    """Registers our subclass of a stock task under the stock name."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from hydra.core.config_store import ConfigStore

    TASK_REGISTRY[name] = task
    if config is None:  # an older task, whose options `add_args` adds
        return
    setattr(task, "__dataclass", config)  # noqa: B010  (outside a class, where Python would mangle the name)
    TASK_DATACLASS_REGISTRY[name] = config
    node = config()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")


def _register_scorer() -> None:
    from fairseq.scoring import register_scorer

    from fairseq_el.text import rouge

    register_scorer("rouge", dataclass=rouge.RougeConfig)(rouge.RougeScorer)
