"""`python -m effloop`."""

from effloop.cli.main import entry

if __name__ == "__main__":
    entry()
