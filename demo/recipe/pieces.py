"""Stage 2: a SentencePiece model of the training texts, fairseq's dictionary, all texts in pieces.

Usage: pieces.py PAIRS OUT. Writes OUT/sentencepiece.model, OUT/dict.txt and
OUT/{train,more,valid,test}.{source,target}.
"""

import sys
from pathlib import Path

import sentencepiece

VOCABULARY = 6000
SOURCE_PIECES = 190  # longer descriptions are cut
MASK = "<mask>"  # for infilling, stage 3


def train(pairs: Path, model: Path) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.SentencePieceTrainer.train(
        input=[str(pairs / "train.source"), str(pairs / "train.target")],
        model_prefix=str(model.with_suffix("")),
        vocab_size=VOCABULARY,
        model_type="unigram",
        character_coverage=0.9995,
        shuffle_input_sentence=False,  # all lines in their order give the same pieces every time
        # fairseq's dictionary brings its own special symbols.
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        unk_id=0,
        num_threads=2,
        minloglevel=1,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def write_dictionary(processor: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """One piece a line. fairseq wants a count beside each and does nothing with it here."""
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    entries = [piece for piece in pieces if piece != "<unk>"] + [MASK]
    path.write_text("".join(f"{entry} 100\n" for entry in entries), encoding="utf-8")


def encode(processor: sentencepiece.SentencePieceProcessor, texts: Path, out: Path) -> None:
    limit = SOURCE_PIECES if texts.suffix == ".source" else None
    with texts.open(encoding="utf-8") as lines, out.open("w", encoding="utf-8") as encoded:
        for line in lines:
            pieces = processor.encode(line.strip(), out_type=str)
            print(*pieces[:limit], file=encoded)


def main(pairs: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    processor = train(pairs, out / "sentencepiece.model")
    write_dictionary(processor, out / "dict.txt")
    for split in ("train", "more", "valid", "test"):
        for side in ("source", "target"):
            encode(processor, pairs / f"{split}.{side}", out / f"{split}.{side}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
