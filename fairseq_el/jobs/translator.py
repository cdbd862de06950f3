"""Text in, translations out: `Translator.load("m2m100_418M", source_lang="en", target_lang="de")("Hello")`."""

from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.summarizer import Summarizer


class Translator(Summarizer):
    """A `Summarizer` whose default preset is `translation`; `load` takes `source_lang` and `target_lang`.

    A model with many languages needs both, by its codes or by short ones: `en` is also `en_XX` or `eng_Latn`.
    """

    @classmethod
    def default_preset(cls, files: ModelFiles) -> str:
        return "translation"
