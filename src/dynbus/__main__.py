"""`python -m dynbus` is `dynbus`."""

from dynbus.cli import main

if __name__ == "__main__":
    main()
