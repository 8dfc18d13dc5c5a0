"""What lra finds through the entry points of pyproject.toml. The recipe and the table lie beside this file."""
