"""Measurements: attention (`attention.py`), its traffic to and from HBM (`io.py`), a training step
(`step.py`), kernels' tiles (`tune.py`).
"""
