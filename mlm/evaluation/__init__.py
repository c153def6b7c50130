"""Scores and predictions of trained models."""
