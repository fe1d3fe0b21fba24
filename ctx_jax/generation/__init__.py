"""Text from a model: one loop for every model that reads from left to right."""
