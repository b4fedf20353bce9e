"""Side-by-side measurements with other engines: environments, models, workers, tables. Used by bench/compare.py."""
