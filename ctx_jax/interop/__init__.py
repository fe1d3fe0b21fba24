"""Models and tokenizers of other implementations."""
