"""How the ``config.json`` of each family of models is read."""
