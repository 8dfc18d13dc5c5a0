"""Runs: fitting, testing and what they leave on disk."""
