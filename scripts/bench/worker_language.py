"""Worker for language models of fairseq: stock, or fairseq_el."""

import copy
import time
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from bench.parts import age_history, age_stock, time_parts
from bench.protocol import EOS, THREADS, Answer, Request, reset_peak, resident_memory, serve, without_eos
from fairseq_el.generation.prompt_ensemble import PromptEnsemble
from fairseq_el.generation.prompts import Prompts
from fairseq_el.models.caches import PromptCache
from fairseq_el.models.policy import PolicyState
from fairseq_el.plugin.tasks import ELLanguageModelingConfig, ELLanguageModelingTask

SHORT_PROMPT = 6  # tokens: for stock fairseq a prompt is so many more steps
PREFILLED_PROMPTS = 4


class PrefilledPrompts:
    """Replaces one ensemble's `prefill`: a few prompts are prefilled and timed, once per key, and the batch repeats
    them."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple[PromptCache, torch.Tensor, dict[str, Any]]] = {}
        self.facts: dict[str, Any] = {}

    def stand_in(self, ensemble: PromptEnsemble, key: tuple) -> None:
        compute = ensemble.prefill

        def prefill(prompts: Prompts, *options: Any) -> None:
            if key not in self.known:
                self.known[key] = self.prefill_few(ensemble, compute, prompts, options)
            few, scores, self.facts = self.known[key]
            reset_peak()
            rows = torch.arange(prompts.tokens.size(0)) % scores.size(0)
            ensemble.state.prefix_caches = [repeated(few, rows, ensemble)]
            prompts.scores = scores[rows]

        ensemble.prefill = prefill  # on this instance only; the class stays as it is

    def prefill_few(self, ensemble: PromptEnsemble, compute: Callable, prompts: Prompts, options: tuple):
        few = Prompts(prompts.tokens[:PREFILLED_PROMPTS], prompts.lengths[:PREFILLED_PROMPTS], prompts.opening)
        resident, started = resident_memory()["resident"], time.perf_counter()
        compute(few, *options)
        facts = {
            "sources": few.tokens.size(0),
            "source_seconds": time.perf_counter() - started,
            "source_peak_bytes": resident_memory()["peak"] - resident,
        }
        return ensemble.state.prefix_caches[0], few.scores, facts


def repeated(few: PromptCache, rows: torch.Tensor, ensemble: PromptEnsemble) -> PromptCache:
    """rows: [b], which prompt of the few each sentence has."""
    cache = copy.copy(few)
    cache.policy, cache.policy_state = ensemble.policy, PolicyState()
    cache.inputs, cache.key_values = dict(few.inputs), dict(few.key_values)
    cache.select(rows)
    return cache


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
        self.prefilled = PrefilledPrompts()
        self.versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        """Prompts of `source_length` tokens, the opening </s> among them; `length` tokens follow."""
        prompts = torch.tensor([[EOS, *source[:-1]] for source in sources])  # [b, n]
        end = prompts.size(1) - 1 + request.length - 1
        options = {"beam": request.beam, "max_len_a": 0, "max_len_b": end, "min_len": end}
        self.task.args.el_attention = request.attention
        generator = self.task.build_generator([self.model], Namespace(**options | request.search))
        if self.is_stock and type(generator) is not SequenceGenerator:
            raise TypeError(f"expected fairseq's own generator, got {type(generator).__name__}")
        if request.op == "parts":
            return self.answer_in_parts(request, generator, prompts)
        state = self.watch_cache(generator) if self.is_stock else None
        sample = self.sample(prompts)
        started = time.perf_counter()
        hypotheses = self.task.inference_step(generator, [self.model], sample)
        return Answer(
            seconds=time.perf_counter() - started,
            source_state_bytes=state[prompts.size(1) - 1] if state else generator.profile.peak_source_bytes,
            tokens=[without_eos(best[0]["tokens"].tolist())[prompts.size(1) - 1 :] for best in hypotheses],
        )

    def sample(self, prompts: torch.Tensor) -> dict[str, Any]:
        """prompts: [b, n]"""
        lengths = torch.full((prompts.size(0),), prompts.size(1))
        return {"id": None, "net_input": {"src_tokens": prompts, "src_lengths": lengths}}

    def answer_in_parts(self, request: Request, generator, prompts: torch.Tensor) -> Answer:
        """prompts: [b, n]. In stock fairseq they are steps, so that a short one is as good, and where steps are
        timed at the end, none is left."""
        if self.is_stock:
            age, steps = age_stock(self.model.decoder), prompts.size(1) + request.length - 1
            prompts = prompts[:, :SHORT_PROMPT]
            facts = {"sources": 0, "source_seconds": 0.0, "source_peak_bytes": 0}
        else:
            age, steps = age_history, request.length
            self.prefilled.stand_in(generator.model, (prompts.size(1), request.beam, request.attention))
        reset_peak()
        resident = resident_memory()["resident"]
        parts = time_parts(
            generator.model,
            steps,
            age,
            lambda: self.task.inference_step(generator, [self.model], self.sample(prompts)),
        )
        facts = facts if self.is_stock else self.prefilled.facts
        return Answer(parts=facts | parts | {"resident_bytes": resident})

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
