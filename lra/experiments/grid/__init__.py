"""What runs where: a table's cells and their states, the launchers that run them, and the plan of a dry run.

A table is a YAML file `configs/table/<name>.yaml`: columns, attentions, a recipe, and where there are any the seeds and
a paper's figures. A cell is one run, and its run directory is its only state: done, out of memory, failed (tried again
once), interrupted or open. Who works on a cell holds the lock on the file `claim` of its directory, which the child
process inherits: a killed command leaves neither a stale lock nor a run that works unseen. The local launcher starts a
process for each GPU, or several with `per_device=`. The SLURM launcher submits an array whose tasks run the local
launcher.
"""
