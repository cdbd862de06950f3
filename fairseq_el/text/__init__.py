"""Text: tokenisers and dictionaries, sentences, ROUGE."""
