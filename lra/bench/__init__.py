"""Measurements of attention: speed and memory (`attention.py`), traffic to and from HBM (`io.py`)."""
