"""How good a model is: perplexity and bits per byte over a split, and the baselines that it must beat."""
