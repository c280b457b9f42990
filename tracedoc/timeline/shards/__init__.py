"""Sharded units of one rank (FSDP, ZeRO-3): what each gather brings, and when."""
