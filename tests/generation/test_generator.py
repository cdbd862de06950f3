"""Generation with EL-attention finds the hypotheses that stock fairseq finds."""

from argparse import Namespace

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_el.models.attention import ELAttention
from fairseq_el.models.policy import AttentionPolicy
from helpers import DEMO, assert_same_hypotheses

SEARCHES = {
    "beam": {"beam": 4},
    "beam with penalties": {"beam": 5, "lenpen": 2.0, "unkpen": 3.0, "temperature": 1.4, "min_len": 5},
    "diverse beam": {"beam": 4, "diverse_beam_groups": 4, "diverse_beam_strength": 0.2},
    "diverse siblings": {"beam": 4, "diversity_rate": 0.5},
    "greedy": {"beam": 1},
    "top-k sampling": {"beam": 3, "sampling": True, "sampling_topk": 10},
    "sampling": {"beam": 1, "sampling": True},
    # outputs as long as sources, as far as the decoder has positions
    "length of the source": {"beam": 2, "match_source_len": True, "longest": 100},
    "unnormalised": {"beam": 4, "unnormalized": True},
    "short outputs": {"beam": 4, "max_len_b": 3},
    "n-best": {"beam": 6, "nbest": 6},
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_same_hypotheses_as_stock(stock, el, search):
    assert_same_hypotheses(el().generate(**search), stock().generate(**search))


def test_same_hypotheses_with_a_prefix(stock, el):
    def prefix(sample):
        return {"prefix_tokens": sample["target"][:, :2]}

    expected = stock().generate(beam=4, inference=prefix)
    assert_same_hypotheses(el().generate(beam=4, inference=prefix), expected)


@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_same_hypotheses_with_constraints(stock, el, order):
    """Each sentence must contain the second token of its reference."""

    def constraints(sample):
        wanted = sample["target"][:, 1]
        rows = wanted.numel()
        packed = torch.stack([torch.ones(rows).long(), wanted, torch.zeros(rows).long()], dim=1)
        return {"constraints": packed}

    search = {"beam": 4, "constraints": order, "inference": constraints}
    assert_same_hypotheses(el().generate(**search), stock().generate(**search))


def test_same_hypotheses_from_an_ensemble(stock, el, perturbed_model):
    paths = [DEMO / "model.pt", perturbed_model]
    assert_same_hypotheses(el(*paths).generate(beam=4), stock(*paths).generate(beam=4))


def test_same_alignments(stock, el):
    ours, theirs = (
        system.generate(beam=2, print_alignment="soft") for system in (el(), stock())
    )
    assert_same_hypotheses(ours, theirs)
    for mine, other in zip(ours, theirs):
        for h, g in zip(mine, other):
            torch.testing.assert_close(h["attention"], g["attention"], atol=1e-5, rtol=0)
            assert len(h["alignment"]) == len(g["alignment"]) > 0


def test_a_language_model_is_mixed_in_as_in_stock(stock, el):
    """Shallow fusion: any model with log-probabilities over the vocabulary will do."""

    class Unigram(torch.nn.Module):
        def forward(self, tokens):
            generator = torch.Generator().manual_seed(3)
            row = torch.randn(6004, generator=generator)
            return row.expand(tokens.size(0), tokens.size(1), -1)[..., : self.size].clone()

        def get_normalized_probs(self, net_output, log_probs, sample):
            return torch.log_softmax(net_output, dim=-1)

    fused = Unigram()
    system = el()
    fused.size = len(system.task.target_dictionary)
    search = {"beam": 4, "lm_model": fused, "lm_weight": 0.3}
    with_lm = system.generate(**search)
    assert_same_hypotheses(with_lm, stock().generate(**search))
    without = system.generate(beam=4)
    assert any(a[0]["tokens"].tolist() != b[0]["tokens"].tolist() for a, b in zip(with_lm, without))


@pytest.mark.parametrize("budget", [None, "20M"])
def test_switching_in_the_middle_of_generation_changes_no_hypothesis(stock, el, monkeypatch, budget):
    """On a machine where renting for five steps costs as much as building; with room for all layers, or for
    some. Sentences finish before, at and after the switch."""
    step_now, steps_of_builds = [0], []
    build = ELAttention.build_key_values

    def buys_at_step_five(policy, shape, machine, state):
        state.steps = step_now[0] = state.steps + 1
        return state.steps >= 5

    def recorded_build(attention, states):
        steps_of_builds.append(step_now[0])
        return build(attention, states)

    monkeypatch.setattr(AttentionPolicy, "wants_key_values", buys_at_step_five)
    monkeypatch.setattr(ELAttention, "build_key_values", recorded_build)
    ours = el(el_memory_budget=budget).generate(beam=4)
    assert_same_hypotheses(ours, stock().generate(beam=4))
    assert min(steps_of_builds) == 5  # later only where finished sentences made room


def test_a_source_of_one_token(stock, el):
    """Nothing but the end of the sentence."""
    found = []
    for system in (el(), stock()):
        task, models = system.task, system.models
        generator = task.build_generator(models, Namespace(beam=3, max_len_b=6))
        eos = task.source_dictionary.eos()
        tokens = torch.tensor([[eos], [eos]])
        sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([1, 1])}}
        found.append(task.inference_step(generator, models, sample))
    assert_same_hypotheses(*found)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_results_do_not_depend_on_the_batch(el, batch_size):
    assert_same_hypotheses(el().generate(beam=4, batch_size=batch_size), el().generate(beam=4))


def test_searches_leave_nothing_behind_on_the_model(stock, el):
    """The same model serves beam, greedy and beam search in turn."""
    system = el()
    beam = system.generate(beam=4)
    assert_same_hypotheses(system.generate(beam=1), stock().generate(beam=1))
    assert_same_hypotheses(system.generate(beam=4), beam)


def test_models_without_an_el_form_run_as_in_stock(stock, el):
    """Also in an ensemble with models that have one."""
    ours, theirs = el(), stock()
    ours.models = [stock().models[0], el().models[0]]
    theirs.models = [stock().models[0], stock().models[0]]
    assert_same_hypotheses(ours.generate(beam=4), theirs.generate(beam=4))
    ours.models = stock().models
    assert_same_hypotheses(ours.generate(beam=4), stock().generate(beam=4))


def test_the_stock_generator_works_on_an_el_model(stock, el):
    system = el()
    system.task.build_generator = lambda models, args, **_: SequenceGenerator(
        models, system.task.target_dictionary, beam_size=args.beam, max_len_b=args.max_len_b
    )
    assert_same_hypotheses(system.generate(beam=4), stock().generate(beam=4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_hypotheses_on_a_gpu(stock, el):
    def on_gpu(system):
        from fairseq import utils

        for model in system.models:
            model.cuda()
        batches = system.batches
        system.batches = lambda size: (utils.move_to_cuda(sample) for sample in batches(size))
        return system.generate(beam=4)

    assert_same_hypotheses(on_gpu(el()), on_gpu(stock()))
