"""T5: an encoder that looks both ways, and a decoder that reads the encoder's output by cross-attention."""
