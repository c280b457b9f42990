"""What HolisticTraceAnalysis says of the same files, and why it differs."""
