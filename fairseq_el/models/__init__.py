"""Models: attention, encoder, caches, the cost model and policy, and the conversion of stock models."""
