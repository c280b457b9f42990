"""The analysed step of all ranks as a program that can be played again, unchanged or with a change."""
