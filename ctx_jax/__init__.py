"""The lineage of context-based language models, pretrained, transferred, evaluated and compared in JAX/Flax."""
