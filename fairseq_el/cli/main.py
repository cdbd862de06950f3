"""The command `fairseq-el`: finds the subcommand, and imports nothing else."""

import importlib
import sys

COMMANDS = {
    "summarize": "summarise or complete texts: lines or JSON in, the same with summaries out",
    "evaluate": "run fairseq-generate on a data set with a preset, and score it",
    "score": "ROUGE and BLEU of a file of summaries",
    "prepare": "make fairseq's data from CNN/DailyMail, XSum or SQuAD",
    "convert": "convert checkpoints from and to Hugging Face's format",
    "merge": "put the parts of a sharded job together",
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: fairseq-el COMMAND [OPTIONS]", "", *lines, "", "fairseq-el COMMAND --help lists the options of one."]
    )


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
    elif words[0] in ("-V", "--version"):
        from fairseq_el import __version__

        print(f"fairseq_el {__version__}")
    elif words[0] not in COMMANDS:
        sys.exit(f"fairseq-el: error: there is no command {words[0]!r}: take one of {', '.join(COMMANDS)}")
    else:
        sys.argv = [f"fairseq-el {words[0]}", *words[1:]]
        importlib.import_module(f"fairseq_el.cli.{words[0]}").main()
