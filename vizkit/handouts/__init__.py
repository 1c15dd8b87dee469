"""Static pages of the notebooks: they play with no kernel and no network."""
