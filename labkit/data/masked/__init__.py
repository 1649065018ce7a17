"""Samples with masked words for BERT and T5, cut from documents that are split into sentences."""
