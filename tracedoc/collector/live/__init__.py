"""What a rank that runs is asked for, or tells of itself when it hangs."""
