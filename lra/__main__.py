from lra.cli import main

main()
