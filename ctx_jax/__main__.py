"""`python -m ctx_jax`."""

from ctx_jax.cli import main

if __name__ == "__main__":
    main()
