"""Tokens: generated or imported once, kept in a store, and cut into batches. Nothing here knows a model.

- Generated: `listops.py` with `expressions.py`, and `pathfinder/`. Item `i` of a seed is a function of (seed, i), so
  the number of cores does not matter. `numba_rng.py` caches what numba compiles under a hash of this whole folder,
  because numba inlines functions across files.
- Imported: `imdb.py` and `cifar10.py` from the Hub (`hub.py`), `aan.py` and others from LRA's release
  (`lra_release.py`).
  Each line and image is checked, and the first wrong one stops the import. `checks.py` compares the whole with what it
  should be. A split that equals train is refused. Other differences are noted in the manifest, and runs repeat the
  serious ones.
- Kept: `store.py` and `writer.py`. Sequences are stored whole and cut when a batch is made, so that `task.max_length`
  of Text needs no new store. A file system without locks is refused.
- Read: `order.py` says which rows a step has. `split.py` makes a batch of rows, and `resident.py` does the same for
  splits that were uploaded to the GPU. Both share `collate`, and give bitwise the same batch.

The splits that a run trains and evaluates on are uploaded at its start if together they need at most a quarter of the
GPU's memory, under DDP to the GPU of each rank. Otherwise, and on a CPU, batches are made on the host and sent by one
transfer (`collated.py`). `tokens=lit` is applied on the host before the upload, so only lit pixels need memory.
"""
