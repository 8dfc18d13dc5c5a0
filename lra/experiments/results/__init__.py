"""What is made of runs: the ledger of their results, reports, and archives that carry them between machines.

A result is found by its configuration, not by its path. Every table marks a result (†) whose code was changed or has no
stated commit, its own or that of a run before it, and results of different code or data that stand together. A column
without results of the newest version of its task shows those of an older one, and a note says so. Every format of a
report is made of the same rows.
"""
