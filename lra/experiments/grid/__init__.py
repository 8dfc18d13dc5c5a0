"""What runs where: a table's cells and their states, the launchers that run them, and the plan of a dry run."""
