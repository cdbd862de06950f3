"""Translates a file of texts in their order: `fairseq-el translate`, the job of `summarize` with languages."""

from fairseq_el.cli.summarize import main

__all__ = ["main"]
