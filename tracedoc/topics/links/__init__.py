"""Links: how fast data moves beside what the link should give."""
