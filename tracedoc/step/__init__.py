"""What travels from the worker that reads a rank to the driver: kilobytes a step."""
