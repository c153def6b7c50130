"""The runs: the only place that knows Lightning and Weights & Biases."""
