"""The command `fairseq-el` and its subcommands."""
