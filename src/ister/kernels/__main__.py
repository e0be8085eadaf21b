"""`python -m ister.kernels`."""

from ister.kernels import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
