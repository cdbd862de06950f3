"""Worker for stock fairseq, and for stock fairseq with its cache copied per beam as the paper had
it."""

from typing import Any

from fairseq.models.bart import BARTModel
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationConfig, TranslationTask

import fairseq_el.checkpoints.loading  # noqa: F401  lets torch load a released checkpoint's argparse.Namespace
from bench.parts import age_nothing, age_stock
from bench.protocol import Request, serve
from bench.worker_fairseq import FairseqSystem


class StockSystem(FairseqSystem):
    """fairseq's own classes from end to end."""

    def __init__(self, options: dict[str, Any]):
        self.copied = options["copied"]
        super().__init__(options)
        if type(self.model) not in (BARTModel, TransformerModel):
            raise TypeError(f"expected fairseq's own model, got {type(self.model).__name__}")

    def setup_task(self, options: dict[str, Any]) -> TranslationTask:
        return TranslationTask.setup_task(
            TranslationConfig(data=options["data"], source_lang="source", target_lang="target")
        )

    def build_generator(self, request: Request) -> SequenceGenerator:
        generator = self.task.build_generator([self.model], self.generation_options(request))
        if type(generator) is not SequenceGenerator:
            raise TypeError(f"expected fairseq's own generator, got {type(generator).__name__}")
        if self.copied or request.multi_head or request.beam == 1:
            self.unshare_cache()
        if request.multi_head == "no-cache":
            generator.model.has_incremental = False
        return generator

    def ageing(self, request: Request):
        return age_nothing if request.multi_head == "no-cache" else age_stock(self.model.decoder)

    def unshare_cache(self) -> None:
        """Undoes what a generator with beams sets up on the model, and leaves there, for sharing
        the cache: attention that knows of beams, and an encoder whose output is not repeated for
        them.

        K and V are then built and kept for every beam, as in the paper's baseline, and the
        encoder's output follows the beams. Older releases of fairseq made K and V follow them too;
        this one knows that rows of the same sentence are equal and leaves them in place, so that it
        is the faster baseline. Only BART shares its cache in the first place.
        """
        if not isinstance(self.model, BARTModel):
            return
        self.model.set_beam_size(1)
        vars(self.model.encoder).pop("reorder_encoder_out", None)

    def source_state_bytes(self, generator: SequenceGenerator, sample: dict[str, Any]) -> int:
        """Bytes of the keys and values of encoder-decoder attention, taken while a batch is
        generated."""
        sizes = []
        forward_decoder = generator.model.forward_decoder

        def measuring(tokens, encoder_outs, incremental_states, temperature):
            result = forward_decoder(tokens, encoder_outs, incremental_states, temperature)
            sizes.append(self.cached_bytes(incremental_states[0]))
            return result

        generator.model.forward_decoder = measuring
        generator.generate([self.model], sample)
        return max(sizes)

    def cached_bytes(self, incremental_state: dict[str, Any]) -> int:
        buffers = [
            layer.encoder_attn._get_input_buffer(incremental_state)
            for layer in self.model.decoder.layers
        ]
        return sum(
            buffer[name].numel() * buffer[name].element_size()
            for buffer in buffers
            for name in ("prev_key", "prev_value")
        )


if __name__ == "__main__":
    serve(StockSystem)
