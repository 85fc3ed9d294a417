"""Trained models in use: scored, applied to images, exported."""
