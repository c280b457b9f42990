"""What a rank reads of its host: surroundings, place, and GPU."""
