"""Every effect of importing `fairseq_el`, in one function."""

import functools

from fairseq_el import errors, lazy_import
from fairseq_el.plugin import log_filters, threads


@functools.cache
def register() -> None:
    """Makes the plugin known to fairseq and torch. The second call does nothing.

    - models: the architectures `el_transformer`, `el_bart` and `el_transformer_lm`, with a twin of each stock one
    - tasks: `el_translation`, `el_language_modeling` and `stock_cache_meter`; the stock names `translation` and
      `language_modeling` stand for ours, so that command lines stay as they are
    - the scorer `rouge`
    - the environment: GOMP_SPINCOUNT, unless it or OMP_WAIT_POLICY is set or torch was imported before
    - torch's list of safe globals: the classes in released checkpoints
    - numpy, logging, warnings and `sys.excepthook`: names that fairseq 0.12 needs, no notices about fairseq's own
      libraries, and one-line errors in fairseq's commands
    """
    threads.limit_spinning()
    log_filters.silence_library_notices()
    with log_filters.no_import_notices():
        lazy_import.import_fairseq()
    errors.install_hook()
    _register_models()
    _register_tasks()
    _register_scorer()

    from fairseq_el.checkpoints import loading
    from fairseq_el.plugin import compatibility

    loading.allow_released_classes()
    compatibility.restore_numpy_names()


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
    register_task("stock_cache_meter", dataclass=stock_cache_meter.MeteredConfig)(stock_cache_meter.MeteredTask)
    _stand_in_for("translation", "el_translation")
    _stand_in_for("language_modeling", "el_language_modeling")


def _stand_in_for(stock_name: str, el_name: str) -> None:
    """Lets a stock task's name stand for our subclass of it. The registries are fairseq's own; its classes stay."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from hydra.core.config_store import ConfigStore

    TASK_REGISTRY[stock_name] = TASK_REGISTRY[el_name]
    config = TASK_DATACLASS_REGISTRY[stock_name] = TASK_DATACLASS_REGISTRY[el_name]
    node = config()
    node._name = stock_name
    ConfigStore.instance().store(name=stock_name, group="task", node=node, provider="fairseq")


def _register_scorer() -> None:
    from fairseq.scoring import register_scorer

    from fairseq_el.text import rouge

    register_scorer("rouge", dataclass=rouge.RougeConfig)(rouge.RougeScorer)
