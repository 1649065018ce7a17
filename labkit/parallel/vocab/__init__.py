"""Everything that is cut along the vocabulary: the embedding, the output layer, the loss, and checks of token ids."""
