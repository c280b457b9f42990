"""Memory and copies: how much is used, what would fit, and copies that nothing hides."""
