"""Worker for language models of fairseq: stock, or fairseq_el."""

import time
from argparse import Namespace
from importlib.metadata import version
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from bench.protocol import EOS, THREADS, Answer, Request, serve, without_eos
from fairseq_el.tasks import ELLanguageModelingConfig, ELLanguageModelingTask


class LanguageSystem:
    """Prompts in, as `fairseq-generate` hands them to the task; what follows them out."""

    def __init__(self, options: dict[str, Any]):
        torch.set_num_threads(THREADS)
        self.is_stock = options["stock"]
        if self.is_stock:
            self.task = LanguageModelingTask.setup_task(LanguageModelingConfig(data=options["data"]))
        else:
            self.task = ELLanguageModelingTask.setup_task(
                ELLanguageModelingConfig(
                    data=options["data"],
                    el_packing=options["packing"],
                    el_unscored_prompts=options["unscored"],
                )
            )
        models, _ = checkpoint_utils.load_model_ensemble([options["checkpoint"]], task=self.task)
        self.model = models[0].eval()
        if self.is_stock and type(self.model) is not TransformerLanguageModel:
            raise TypeError(f"expected fairseq's own class, got {type(self.model).__name__}")
        self.model.prepare_for_inference_(Namespace(task=self.task.args, generation=GenerationConfig()))
        self.vocabulary = len(self.task.target_dictionary)
        self.versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        """Prompts of `source_length` tokens, the opening </s> among them; `length` tokens follow."""
        prompts = torch.tensor([[EOS, *source[:-1]] for source in sources])  # [b, n]
        end = prompts.size(1) - 1 + request.length - 1
        search = Namespace(beam=request.beam, max_len_a=0, max_len_b=end, min_len=end)
        self.task.args.el_attention = request.attention
        generator = self.task.build_generator([self.model], search)
        if self.is_stock and type(generator) is not SequenceGenerator:
            raise TypeError(f"expected fairseq's own generator, got {type(generator).__name__}")
        state = self.watch_cache(generator) if self.is_stock else None
        sample = {
            "id": torch.arange(len(sources)),
            "net_input": {"src_tokens": prompts, "src_lengths": torch.full((len(sources),), prompts.size(1))},
        }
        started = time.perf_counter()
        hypotheses = self.task.inference_step(generator, [self.model], sample)
        return Answer(
            seconds=time.perf_counter() - started,
            source_state_bytes=state[prompts.size(1) - 1] if state else generator.profile.peak_source_bytes,
            tokens=[without_eos(best[0]["tokens"].tolist())[prompts.size(1) - 1 :] for best in hypotheses],
        )

    def watch_cache(self, generator: SequenceGenerator) -> list[int]:
        """Bytes of stock's keys and values after each step."""
        sizes: list[int] = []
        forward_decoder = generator.model.forward_decoder

        def measuring(tokens, encoder_outs, incremental_states, temperature):
            result = forward_decoder(tokens, encoder_outs, incremental_states, temperature)
            buffers = [
                layer.self_attn._get_input_buffer(incremental_states[0])
                for layer in self.model.decoder.layers
            ]
            sizes.append(sum(b[n].numel() * 4 for b in buffers for n in ("prev_key", "prev_value")))
            return result

        generator.model.forward_decoder = measuring
        return sizes


if __name__ == "__main__":
    serve(LanguageSystem)
