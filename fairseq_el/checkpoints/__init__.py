"""Checkpoints: safe loading, validation, meta-device initialisation, and Hugging Face's format."""
