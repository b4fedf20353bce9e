"""Backends: what executes step plans. Chosen by name, imported lazily."""
