"""Jobs: presets, inputs, batching, journal, shards, Ray, and the Summarizer."""
