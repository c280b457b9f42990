"""The page that stands alone, and its parts in notebooks."""
