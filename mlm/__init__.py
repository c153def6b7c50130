"""Masked language models: plain text in, a pretrained encoder out."""
