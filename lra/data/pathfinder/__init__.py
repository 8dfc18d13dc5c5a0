"""Pathfinder's images: drawn by the law of LRA's sets, or imported.

`law.py` has the parameters, `stamps.py` the tables that follow from them, and `contours.py` the compiled drawing.
`generate.py` makes splits, `released.py` imports LRA's own images, and `markers.py` finds the two markers again.
"""
