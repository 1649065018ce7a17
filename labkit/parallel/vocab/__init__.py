"""Layers that are cut along the vocabulary: the embedding, the output layer, the loss. Also checks of token ids."""
