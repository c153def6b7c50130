"""Checks and choices before torch is imported: the command line, files, run folders."""
