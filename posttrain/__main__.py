"""`python -m posttrain` is the command `posttrain`."""

from posttrain.cli import main

if __name__ == "__main__":
    main()
