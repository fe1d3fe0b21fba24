"""Meshes, multi-host start, and the table that maps logical axes to mesh axes."""
