"""What is made of runs: the ledger of their results, reports, and archives that carry them between machines."""
