"""`python -m petatron` is `petatron`."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry()
