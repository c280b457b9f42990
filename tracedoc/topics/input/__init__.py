"""Input: the data loader, and copies of batches to the GPU."""
