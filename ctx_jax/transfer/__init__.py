"""What a pretrained model is used for: each model's own input (inputs.py), and vectors of texts (features.py)."""
