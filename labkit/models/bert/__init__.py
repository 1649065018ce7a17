"""BERT: a bidirectional transformer with a masked-LM and a sentence-order head."""
