"""Language models of a generator: prefill of the prompts, then steps."""

import math

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_el.generation.device_logits import DeviceLogits
from fairseq_el.generation.ensemble import ELEnsemble, low_precision_of
from fairseq_el.generation.non_finite import check_finite
from fairseq_el.generation.prompts import Prompts
from fairseq_el.kernels import ops
from fairseq_el.models.caches import Prefill, PromptCache
from fairseq_el.models.encoder import split_by_tokens

SCORED_TOKENS = 256
"""Tokens of prompts that are scored at a time: each needs a row as wide as the vocabulary."""


class PromptEnsemble(ELEnsemble):
    """An ensemble of language models."""

    def forward_encoder(self, net_input: dict[str, Tensor]):
        """There is no encoder: the caches come from `prefill`."""
        return self.state.prefix_caches if self.accelerated else super().forward_encoder(net_input)

    def decoder_inputs(self) -> list[None]:
        return [None] * self.models_size

    # ---- before the first step

    @torch.no_grad()
    def prefill(self, prompts: Prompts, starts_behind: bool, temperature: float, scoring: bool = True) -> None:
        """Computes the caches and the prompts' scores, which are zero without `scoring`.

        starts_behind: whether the search starts behind the prompts, else at the beginning of the texts.
        """
        given, prompts = prompts, prompts.to(self.device)
        inputs = prompts.inputs(self.single_model.decoder.padding_idx)
        caches = [
            PromptCache(
                prompts.lengths, len(model.decoder.layers), self.beam_size, starts_behind,
                policy=self.policy, reserved_bytes=self.beam_bytes(model, inputs.size(0)),
                low_precision=low_precision_of(model),
            )
            for model in self.models
        ]  # fmt: skip
        # LayerDrop draws random numbers whenever its layers are iterated over: prefill must not, a replayed step must
        with self.profile.time("prefill"), torch.random.fork_rng(devices=[]):
            scores = [
                self._prefill_model(model, cache, inputs, prompts, temperature if scoring else None)
                for model, cache in zip(self.models, caches)
            ]
        together = scores[0]
        if len(scores) > 1:
            together = torch.stack(scores).logsumexp(dim=0) - math.log(len(scores))
        if self.checks_finite:
            check_finite(together)
        given.scores = together.to(given.tokens.device)
        self.state.prefix_caches = list(caches)
        self.profile.record_state(sum(cache.nbytes() for cache in caches), 0)

    def _prefill_model(
        self, model: BaseFairseqModel, cache: PromptCache, inputs: Tensor, prompts: Prompts, temperature: float | None
    ) -> Tensor:
        """inputs: [b, n]; returns log-probabilities of the prompts' tokens, [b, n], zero at padding, and all zero
        without a temperature."""
        b, n = inputs.shape
        scores = torch.zeros(b, n, device=inputs.device)
        on_cpu = inputs.device.type == "cpu"
        for rows in split_by_tokens(prompts.lengths.tolist()) if on_cpu else [slice(0, b)]:
            longest = int(prompts.lengths[rows].max())
            if longest == 0:
                continue
            prefill = Prefill(cache, rows, longest)
            features, _ = model.decoder.extract_features(
                Prefill.rows(inputs[rows, :longest]), encoder_out=None, incremental_state={Prefill.KEY: prefill}
            )
            if temperature is None:
                continue
            features = prefill.by_position(features).transpose(0, 1)  # [b', n', d]
            real = torch.arange(longest, device=inputs.device) < prompts.lengths[rows].unsqueeze(1)
            targets = prompts.tokens[rows, :longest][real]
            scores[rows, :longest][real] = self._score(model, features[real], targets, temperature)
        return scores

    def _score(self, model: BaseFairseqModel, features: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of targets [tokens] after features [tokens, d]."""
        scores = []
        for rows, wanted in zip(features.split(SCORED_TOKENS), targets.split(SCORED_TOKENS)):
            out = model.decoder.output_layer(rows.unsqueeze(0)).div_(temperature)
            if self.offers_logits():
                logits = out[0].float()
                score = logits.gather(1, wanted.unsqueeze(1)).squeeze(1) - ops.logsumexp(logits)
            else:
                probabilities = model.get_normalized_probs((out, None), log_probs=True, sample=None)[0]
                score = probabilities.gather(1, wanted.unsqueeze(1)).squeeze(1)
            scores.append(score)
        return torch.cat(scores)

    # ---- each step

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature: float = 1.0):
        if not self.accelerated:
            return super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        step, state = tokens.size(1) - 1, self.state
        if state.replayed is not None and step < state.replayed.tokens.size(1):
            return self.replay(state.replayed, step), None
        scores, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        if state.bounds is not None:
            state.bounds.apply(scores.scores if isinstance(scores, DeviceLogits) else scores, step)
        if step == 0 and state.start_scores is not None and not self.returns_logits:  # else the search adds them
            scores += state.start_scores.repeat_interleave(self.beam_size).unsqueeze(1)
        return scores, attention

    def replay(self, prompts: Prompts, step: int) -> Tensor:
        """Log-probabilities [b * x, vocabulary] of a step in which all rows are forced to take one token."""
        assert prompts.scores is not None
        vocabulary = len(self.single_model.decoder.dictionary)
        tokens = prompts.tokens[:, step].repeat_interleave(self.beam_size)
        scores = prompts.scores[:, step].repeat_interleave(self.beam_size)
        self.state.log_normaliser = torch.zeros_like(scores)
        for model in self.models:
            next(iter(model.decoder.layers))  # draws the random numbers that the step would
        forced = scores.new_full((tokens.numel(), vocabulary), -math.inf)
        return forced.scatter_(1, tokens.unsqueeze(1), scores.unsqueeze(1))
