"""Communication: what is exposed, how much of that is waiting, and what messages are for."""
