"""Generation: the sequence generators, beam search on logits, the profiler and the non-finite check."""
