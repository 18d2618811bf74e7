"""`python -m eventful.cli`."""

from eventful.cli import main

if __name__ == "__main__":
    main()
