"""Layers that compute across workers."""
