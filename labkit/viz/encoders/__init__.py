"""Figures of BERT and T5: masked words, the place of the norms, distances in buckets, the stages of two halves."""
