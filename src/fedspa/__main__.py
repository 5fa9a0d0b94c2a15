"""`python -m fedspa` is `fedspa`."""

from fedspa.cli import main

if __name__ == "__main__":
    main()
