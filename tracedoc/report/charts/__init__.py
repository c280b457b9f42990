"""What the page shows below its picture, laid out as rows, places and paths."""
