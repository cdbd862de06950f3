"""The fairseq plugin: tasks, compatibility, log filters, and `register`, every effect of importing."""
