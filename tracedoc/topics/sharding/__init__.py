"""Sharding: units of FSDP and ZeRO-3, what their gathers stall, and offloading."""
