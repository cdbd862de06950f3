"""Models of Hugging Face Transformers as stock fairseq models, and BART back. Transformers itself is not needed.

- reading: the files of a folder; writing: folders of either kind
- weights: tensors handed out one by one, and checks of config.json
- gpt2, bart: names, shapes and settings in fairseq (bart covers mBART, M2M-100 and NLLB, too)
- export: BART the other way
- vocabularies: fairseq's dictionaries
- folder: all of it for one folder
"""

from fairseq_el.checkpoints.huggingface.export import bart_to_huggingface
from fairseq_el.checkpoints.huggingface.folder import HuggingFaceFolder, is_huggingface

__all__ = ["HuggingFaceFolder", "bart_to_huggingface", "is_huggingface"]
