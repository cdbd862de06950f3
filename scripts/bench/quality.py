"""The demo's texts as tokens, and ROUGE of what systems make of them."""

import json
from pathlib import Path

import sentencepiece
from rouge_score.rouge_scorer import RougeScorer

from bench.environment import ROOT
from bench.protocol import EOS

KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
LONGEST = 190  # pieces, as the demo cuts them
SPECIAL = 4  # symbols of fairseq's dictionaries before those in the file


class DemoTexts:
    """In the order of their lengths, as fairseq forms batches."""

    def __init__(self, count: int):
        folder = ROOT / "demo"
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
        words = [line.rsplit(" ", 1)[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()]
        self.words = ["<s>", "<pad>", "</s>", "<unk>", *words]
        ids = {word: index for index, word in enumerate(self.words)}
        sources, targets = (
            (folder / f"test.{side}").read_text(encoding="utf-8").splitlines()[:count] for side in ("source", "target")
        )
        encoded = [
            [ids.get(piece, 3) for piece in self.pieces.encode(text, out_type=str)[: LONGEST - 1]] + [EOS]
            for text in sources
        ]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        self.tokens = [encoded[index] for index in order]
        self.references = [targets[index] for index in order]

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.tokens))

    def text(self, tokens: list[int]) -> str:
        return self.pieces.decode([self.words[token] for token in tokens if SPECIAL <= token < len(self.words)])

    def scores(self, outputs: list[list[int]]) -> dict[str, float]:
        """Means of F1, in percent."""
        scorer = RougeScorer(list(KINDS), use_stemmer=True)
        found = [scorer.score(ref, self.text(tokens)) for ref, tokens in zip(self.references, outputs, strict=True)]
        return {title: 100 * sum(f[kind].fmeasure for f in found) / len(found) for kind, title in KINDS.items()}
