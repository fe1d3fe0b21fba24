"""Looking at runs and models: reports for people."""
